"""The definition of multi-head latent attention, in plain torch. See contract.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from easytorch.kernels.attention import native
from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.attention.native import working_dtype
from easytorch.kernels.multi_latent.contract import check_tensors, default_scale
from easytorch.kernels.multi_latent.plans import absorb, expand, project


def multi_latent_attention(
    query: torch.Tensor,
    query_rope: torch.Tensor,
    latent: torch.Tensor,
    key_rope: torch.Tensor,
    up_key: torch.Tensor | None = None,
    up_value: torch.Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    softmax_dtype: torch.dtype | None = None,
    **features: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (B, T, H, Dv), or (B, T, H, L) without `up_value`, and weights (B, H, T, S), in the query's dtype.

    Projections, scores and softmax are computed in float32, or float64 for float64 inputs; scores and softmax in
    `softmax_dtype` where that is given. features: those of kernels/attention/native.py.
    """
    sizes = check_tensors(query, query_rope, latent, key_rope, up_key, up_value)
    settled = {**features, "softmax_scale": default_scale(sizes, softmax_scale), "softmax_dtype": softmax_dtype}
    attention = functools.partial(native.attention, **settled)
    return _attend(attention, query, query_rope, latent, key_rope, up_key, up_value)


def define(
    query: torch.Tensor,
    query_rope: torch.Tensor,
    latent: torch.Tensor,
    key_rope: torch.Tensor,
    up_key: torch.Tensor | None,
    up_value: torch.Tensor | None,
    call: AttentionCall,
    softmax_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`multi_latent_attention` for checked tensors and a resolved call."""
    attention = functools.partial(native.define, call=call, softmax_dtype=softmax_dtype)
    return _attend(attention, query, query_rope, latent, key_rope, up_key, up_value)


def _attend(
    attention: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    query: torch.Tensor,
    query_rope: torch.Tensor,
    latent: torch.Tensor,
    key_rope: torch.Tensor,
    up_key: torch.Tensor | None,
    up_value: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The plan around `attention(query, key, value)`, which gives output and weights."""
    dtype, working = query.dtype, working_dtype(query)
    query, query_rope, latent, key_rope = (x.to(working) for x in (query, query_rope, latent, key_rope))
    if up_key is not None and up_value is not None:
        tensors = expand(query, query_rope, latent, key_rope, up_key.to(working), up_value.to(working))
        output, weights = attention(*tensors)
    else:
        queries = torch.cat([absorb(query, None if up_key is None else up_key.to(working)), query_rope], dim=-1)
        keys = torch.cat([latent, key_rope], dim=-1)[:, :, None]
        output, weights = attention(queries, keys, latent[:, :, None])
        output = project(output, None if up_value is None else up_value.to(working))
    return output.to(dtype), weights.to(dtype)
