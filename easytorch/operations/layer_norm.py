"""`layer_norm`: (x - mean) / sqrt(variance + eps) * weight + bias."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.layer_norm import aten, native
from easytorch.operations.dispatch.base import backend
from easytorch.operations.dispatch.impl import OperationImpl
from easytorch.operations.dispatch.registry import OperationRegistry


@OperationRegistry.register
class LayerNorm(OperationImpl):
    """`layer_norm(x, weight=None, bias=None, eps=1e-5)`: (..., N) normalized over its last dimension, in x's dtype."""

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
        if backend != "triton":
            return None
        from easytorch.kernels.layer_norm import triton_limits

        return triton_limits.supports(x, weight, bias, dtype=self.metadata.runtime_dtype)

    def forward_native(
        self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
    ) -> Tensor:
        return native.layer_norm(self.cast(x), weight, bias, eps)

    @backend("aten")
    def forward_cpu(
        self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
    ) -> Tensor:
        return aten.layer_norm(self.cast(x), weight, bias, eps)

    @backend("triton")
    def forward_gpu(
        self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
    ) -> Tensor:
        from easytorch.kernels.layer_norm import triton_op

        return triton_op.layer_norm(self.cast(x), weight, bias, eps)
