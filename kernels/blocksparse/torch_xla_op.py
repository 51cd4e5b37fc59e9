"""Block-sparse attention inside a torch_xla graph: one node forward, one backward (pallas_or_jax.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.attention.contract import resolve, window_of
from easytorch.kernels.attention.torch_xla_call import call_jax_on_with_gradient
from easytorch.kernels.blocksparse import pallas_or_jax
from easytorch.kernels.blocksparse.native import check_structure
from easytorch.kernels.blocksparse.pallas_map import Rule


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    chunk_size: int | None = None,
    prefix_length: int | Tensor | None = None,
    **features: Any,
) -> Tensor:
    """(B, T, H, D), (B, S, K, D), (B, S, K, Dv) -> (B, T, H, Dv), in the query's dtype, computed in float32."""
    call = resolve(query, key, value, **features)
    check_structure(query, chunk_size, prefix_length)
    prefix: Tensor | None = None
    if isinstance(prefix_length, Tensor):
        prefix, prefix_length = prefix_length.to(query.device, torch.int32).reshape(-1), True
    causal, window = features.get("causal", False), window_of(features.get("sliding_window"))
    rule = Rule(causal, *window, chunk_size, prefix_length)
    call = call._replace(left=None, right=None)  # the rule says it, with chunks and prefix
    functions = pallas_or_jax.blocksparse_forward, pallas_or_jax.blocksparse_backward
    return call_jax_on_with_gradient(*functions, call, query, key, value, prefix, rule=rule)
