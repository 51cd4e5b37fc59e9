"""The definition of attention, in plain torch: forms all scores, returns the weights too. See contract.py."""

from __future__ import annotations

import torch

from easytorch.kernels.attention.contract import check_features, check_tensors, visible
from easytorch.kernels.attention.dropout import draw_seed, keep_mask


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    causal: bool = False,
    query_segment_ids: torch.Tensor | None = None,
    key_segment_ids: torch.Tensor | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    seed: int | torch.Tensor | None = None,
    softmax_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T, H, D), (B, S, K, D), (B, S, K, Dv) -> output (B, T, H, Dv), weights (B, H, T, S), in the query's dtype.

    Scores and softmax are computed in `softmax_dtype`: float32 by default, float64 for float64 inputs.
    """
    batch, length, keys, heads, _, dim, _ = check_tensors(query, key, value)
    check_features(
        query, key, mask=mask, bias=bias, query_segment_ids=query_segment_ids, key_segment_ids=key_segment_ids,
        softcap=softcap, sinks=sinks, dropout_prob=dropout_prob,
    )  # fmt: skip
    seen = visible(
        length, keys, query.device, mask=mask, causal=causal, query_segment_ids=query_segment_ids,
        key_segment_ids=key_segment_ids, sliding_window=sliding_window,
    )  # fmt: skip
    keep = None
    if dropout_prob > 0.0:
        keep = keep_mask(
            draw_seed() if seed is None else seed, dropout_prob, (batch, heads, length, keys), query.device
        )
    return attend(
        query, key, value, seen=seen, bias=bias, softcap=softcap, sinks=sinks,
        scale=dim**-0.5 if softmax_scale is None else softmax_scale, keep=keep, dropout_prob=dropout_prob,
        working=softmax_dtype or working_dtype(query),
    )  # fmt: skip


def working_dtype(query: torch.Tensor) -> torch.dtype:
    """The dtype of scores and softmax: float32, or float64 for float64 inputs."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    seen: torch.Tensor | None,
    bias: torch.Tensor | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    scale: float,
    keep: torch.Tensor | None,
    dropout_prob: float,
    working: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula of contract.py for some rows, with what they see (`seen`) and keep (`keep`) already boolean.

    (B, T, H, D), (B, S, K, D), (B, S, K, Dv) -> output (B, T, H, Dv), weights (B, H, T, S).
    """
    batch, length, heads, dim = query.shape
    keys, kv_heads, value_dim = key.shape[1], key.shape[2], value.shape[3]
    group = heads // kv_heads
    queries = query.to(working).reshape(batch, length, kv_heads, group, dim)
    scores = torch.einsum("btkgd,bskd->bkgts", queries * scale, key.to(working)).reshape(batch, heads, length, keys)
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
        top = logits.detach().amax(dim=-1, keepdim=True)
        logits = torch.exp(logits - torch.where(torch.isfinite(top), top, 0.0))
    total = logits.sum(dim=-1, keepdim=True)
    weights = logits[..., :keys] / torch.where(total == 0, 1.0, total)
    if keep is not None:
        weights = torch.where(keep, weights / (1.0 - dropout_prob), 0.0)

    grouped = weights.reshape(batch, kv_heads, group, length, keys)
    output = torch.einsum("bkgts,bskd->btkgd", grouped, value.to(working)).reshape(batch, length, heads, value_dim)
    return output.to(query.dtype), weights.to(query.dtype)
