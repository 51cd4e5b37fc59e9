"""`rotary`: position embedding of query and key by rotation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypedDict, Unpack

import torch
from torch import Tensor

from easytorch.kernels.rotary import aten, native, torch_xla_op
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

    paths: ClassVar = {"cpu": "aten", "gpu": "triton", "tpu": "xla"}

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
        if backend == "aten":
            return aten.supports(cos, sin)
        if backend == "triton":
            from easytorch.kernels.rotary import triton_op

            return triton_op.supports(query, key, cos, sin, self.metadata.runtime_dtype)
        if backend == "xla":
            return torch_xla_op.supports(self.cast(query), self.cast(key), cos, sin)
        return None

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
