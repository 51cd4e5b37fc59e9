"""pallas_or_jax.py inside a torch_xla graph: one node forward, one backward; under SPMD over the shards of a mesh."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from easytorch.kernels.attention import pallas_or_jax
from easytorch.kernels.attention.contract import resolve
from easytorch.kernels.attention.torch_xla_call import call_jax_over_shards_with_gradient


def attention(query: Tensor, key: Tensor, value: Tensor, **features: Any) -> Tensor:
    """(B, T, H, D), (B, S, K, D), (B, S, K, Dv) -> (B, T, H, Dv), in the query's dtype, computed in float32."""
    call = resolve(query, key, value, **features)
    functions = pallas_or_jax.flash_forward, pallas_or_jax.flash_backward
    return call_jax_over_shards_with_gradient(*functions, call, query, key, value)
