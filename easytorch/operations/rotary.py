"""`rotary`: position embedding of query and key by rotation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypedDict, Unpack

import torch
from torch import Tensor

from easytorch.kernels.cpu import library
from easytorch.kernels.rotary import aten, cpu, native, torch_xla_op
from easytorch.operations.dispatch.impl import OperationImpl
from easytorch.operations.dispatch.registry import OperationRegistry


class RotaryOptions(TypedDict, total=False):
    """The keywords; kernels/rotary/native.py says what each means."""

    interleaved: bool
    position_ids: Tensor | None
    offset: int


@OperationRegistry.register
class Rotary(OperationImpl):
    """`rotary(query, key, cos, sin, *, interleaved=False, position_ids=None, offset=0) -> (query, key)`: (B, T, H, D)
    and (B, T, K, D), tables (B or 1, T, R), or (L, R) of which position_ids or offset choose the rows.
    """

    paths: ClassVar = {"cpu": "aten", "cpp": "cpu", "gpu": "triton", "tpu": "xla"}
    cpp_reason = "one call for query and key"

    @classmethod
    def get_impl_name(cls) -> str:
        return "rotary"

    @classmethod
    def typical_call(cls) -> tuple[tuple[Any, ...], dict[str, Any]]:
        heads, table = torch.empty(1, 1024, 16, 64, device="meta"), torch.empty(1, 1024, 64, device="meta")
        return (heads, heads, table, table), {}

    def supports(
        self, backend: str, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, **options: Unpack[RotaryOptions]
    ) -> str | None:
        if backend == "cpu":
            return cpu.supports(self.cast(query), self.cast(key), cos, sin, bool(options.get("interleaved")))
        if backend == "aten":
            return aten.supports(cos, sin)
        if backend == "triton":
            from easytorch.kernels.rotary import triton_op

            return triton_op.supports(query, key, cos, sin, self.metadata.runtime_dtype)
        if backend == "xla":
            return torch_xla_op.supports(self.cast(query), self.cast(key), cos, sin)
        return None

    def prefers_cpp(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self.metadata.runtime_dtype is not None or len(args) != 4:
            return False
        # of larger tables the rows are chosen first, by ATen
        if kwargs and (kwargs.get("interleaved") or not kwargs.keys() <= {"interleaved"}):
            return False
        return cpu.prefers(*args)

    def try_cpp(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor] | None:
        """The output of a call without settings if the C++ operator runs it, else None.

        For a model's layers, which ask at each token: the dispatch takes longer than the operator.
        """
        return cpu.run(query, key, cos, sin, library.BEST) if cpu.prefers(query, key, cos, sin) else None

    def run_cpp(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, **options: Unpack[RotaryOptions]
    ) -> tuple[Tensor, Tensor]:
        return cpu.run(query, key, cos, sin, library.BEST)

    def forward_native(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, **options: Unpack[RotaryOptions]
    ) -> tuple[Tensor, Tensor]:
        return self.run(native.rotary, query, key, cos, sin, **options)

    def run(
        self,
        kernel: Callable[..., tuple[Tensor, Tensor]],
        query: Tensor,
        key: Tensor,
        cos: Tensor,
        sin: Tensor,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        return kernel(self.cast(query), self.cast(key), cos, sin, **options)
