"""`layer_norm`: (x - mean) / sqrt(variance + eps) * weight + bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from easytorch.kernels.layer_norm import cpu, native
from easytorch.kernels.repeated.steps import GIVEN, Operator, Steps
from easytorch.operations.dispatch.impl import Choice, OperationImpl
from easytorch.operations.dispatch.registry import OperationRegistry


@OperationRegistry.register
class LayerNorm(OperationImpl):
    """`layer_norm(x, weight=None, bias=None, eps=1e-5)`: (..., N) normalized over its last dimension, in x's dtype."""

    paths: ClassVar = {"cpu": "aten", "cpp": "cpu", "gpu": "triton"}
    unconditional = frozenset({"aten"})
    cpp_reason = "training in 16 bits: gradients of weight and bias are summed in float32 in one pass"

    @classmethod
    def get_impl_name(cls) -> str:
        return "layer_norm"

    @classmethod
    def typical_call(cls) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x, vector = torch.empty(1, 1024, 4096, device="meta"), torch.empty(4096, device="meta")
        return (x, vector, vector), {}

    def supports(
        self, backend: str, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
    ) -> str | None:
        if backend == "cpu":
            return cpu.supports(self.cast(x), weight, bias)
        if backend != "triton":
            return None
        from easytorch.kernels.layer_norm import triton_limits

        return triton_limits.supports(x, weight, bias, dtype=self.metadata.runtime_dtype)

    def prefers_cpp(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return self.metadata.runtime_dtype is None and cpu.prefers(*args, **kwargs)

    def shortcut(self, choice: Choice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
        # in 16 bits ATen sums gradients in them
        if choice.backend != "aten" or {one.dtype for one in args} != {torch.float32}:
            return None
        shape, eps = args[0].shape[-1:], kwargs.get("eps", 1e-5)
        given = (GIVEN[0], tuple(shape), *GIVEN[1 : len(args)], *[None] * (3 - len(args)))
        return Steps(
            lambda x, weight=None, bias=None: torch.layer_norm(x, shape, weight, bias, eps),
            (Operator("aten::layer_norm", (*given, float(eps), True)),),
            switches={(torch, "layer_norm"): torch._C._VariableFunctions.layer_norm},
        )

    def forward_native(
        self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
    ) -> Tensor:
        return self.run(native.layer_norm, x, weight, bias, eps)

    def run(
        self, kernel: Callable[..., Tensor], x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:  # fmt: skip
        return kernel(self.cast(x), weight, bias, eps)
