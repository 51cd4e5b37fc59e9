"""`rotary`: position embedding of query and key by rotation."""

from __future__ import annotations

from typing import Any

import torch

from easytorch.kernels.rotary import native
from easytorch.operations.impl import OperationImpl
from easytorch.operations.registry import OperationRegistry


@OperationRegistry.register
class Rotary(OperationImpl):
    """`rotary(query, key, cos, sin) -> (query, key)`: (B, T, H, D) and (B, T, K, D), tables (B or 1, T, R)."""

    @classmethod
    def get_impl_name(cls) -> str:
        return "rotary"

    @classmethod
    def typical_call(cls) -> tuple[tuple[Any, ...], dict[str, Any]]:
        heads, table = torch.empty(1, 1024, 16, 64, device="meta"), torch.empty(1, 1024, 64, device="meta")
        return (heads, heads, table, table), {}

    def forward_native(
        self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = self.metadata.runtime_dtype
        if dtype is not None:
            query, key = query.to(dtype), key.to(dtype)
        return native.rotary(query, key, cos, sin)
