"""Block-sparse attention inside a torch_xla graph: one node forward, one backward (pallas_or_jax.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.attention.torch_xla_call import call_jax_over_shards_with_gradient
from easytorch.kernels.blocksparse import pallas_or_jax
from easytorch.kernels.blocksparse.contract import resolve


def attention(query: Tensor, key: Tensor, value: Tensor, **features: Any) -> Tensor:
    """(B, T, H, D), (B, S, K, D), (B, S, K, Dv) -> (B, T, H, Dv), in the query's dtype, computed in float32."""
    call, rule = resolve(query, key, value, **features)
    prefix: Tensor | None = None
    if isinstance(rule.prefix, Tensor):
        prefix, rule = rule.prefix.to(query.device, torch.int32).reshape(-1), rule._replace(prefix=True)
    functions = pallas_or_jax.blocksparse_forward, pallas_or_jax.blocksparse_backward
    return call_jax_over_shards_with_gradient(*functions, call, query, key, value, prefix, rule=rule)
