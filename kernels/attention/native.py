"""The definition of attention, in plain torch: computes all scores, returns the weights too. See contract.py."""

from __future__ import annotations

from typing import Any

import torch

from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.attention.contract import resolve, visible
from easytorch.kernels.attention.dropout import keep_mask


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    softmax_dtype: torch.dtype | None = None,
    **features: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T, H, D), (B, S, K, D), (B, S, K, Dv) -> output (B, T, H, Dv), weights (B, H, T, S), in the query's dtype.

    Scores and softmax are computed in `softmax_dtype`: float32 by default, float64 for float64 inputs.
    """
    return define(query, key, value, resolve(query, key, value, **features), softmax_dtype)


def define(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: AttentionCall,
    softmax_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention` for a resolved call."""
    batch, length, heads, _ = query.shape
    keys = key.shape[1]
    keep = None
    if call.seed is not None:
        keep = keep_mask(call.seed, call.dropout_prob, (batch, heads, length, keys), query.device)
    seen = visible(call, length, keys, query.device)
    return attend(query, key, value, call, seen=seen, keep=keep, working=softmax_dtype or working_dtype(query))


def working_dtype(query: torch.Tensor) -> torch.dtype:
    """The dtype of scores and softmax: float32, or float64 for float64 inputs."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: AttentionCall,
    *,
    seen: torch.Tensor | None,
    keep: torch.Tensor | None,
    working: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula of contract.py for some rows, with what they see (`seen`) and keep (`keep`) already boolean.

    Reads the fields of `call` other than those that decide visibility.
    (B, T, H, D), (B, S, K, D), (B, S, K, Dv) -> output (B, T, H, Dv), weights (B, H, T, S).
    """
    softcap, bias, sinks = call.softcap, call.bias, call.sinks
    batch, length, heads, dim = query.shape
    keys, kv_heads, value_dim = key.shape[1], key.shape[2], value.shape[3]
    group = heads // kv_heads
    queries = query.to(working).reshape(batch, length, kv_heads, group, dim)
    scores = torch.einsum("btkgd,bskd->bkgts", queries * call.scale, key.to(working)).reshape(
        batch, heads, length, keys
    )
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.to(working)
    if seen is not None:
        scores = torch.where(seen, scores, float("-inf"))

    logits = scores
    if sinks is not None:
        column = sinks.to(working).reshape(1, heads, 1, 1).expand(batch, heads, length, 1)
        logits = torch.cat([scores, column], dim=-1)
    if logits.shape[-1]:
        # the maximum cancels out of the quotient: it needs no gradient; a row that sees nothing has none
        m_i = logits.detach().amax(dim=-1, keepdim=True)
        logits = torch.exp(logits - torch.where(torch.isfinite(m_i), m_i, 0.0))
    l_i = logits.sum(dim=-1, keepdim=True)
    weights = logits[..., :keys] / torch.where(l_i == 0, 1.0, l_i)
    if keep is not None:
        weights = torch.where(keep, weights / (1.0 - call.dropout_prob), 0.0)

    grouped = weights.reshape(batch, kv_heads, group, length, keys)
    output = torch.einsum("bkgts,bskd->btkgd", grouped, value.to(working)).reshape(batch, length, heads, value_dim)
    return output.to(query.dtype), weights.to(query.dtype)
