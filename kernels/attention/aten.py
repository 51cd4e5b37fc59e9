"""Attention by ATen's `scaled_dot_product_attention`, which picks its own fused kernel. See contract.py."""

from __future__ import annotations

from typing import Any

import torch

from easytorch.kernels.attention.aten_fused import fused
from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.attention.contract import band_of, check_tensors, keeps, kept_scores, resolve, visible
from easytorch.kernels.attention.layout import readable
from easytorch.kernels.attention.native import working_dtype


def supports(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout_prob: float = 0.0,
    seed: int | torch.Tensor | None = None,
    **_: Any,
) -> str | None:
    """None, or the part of the call that ATen cannot express. Takes the arguments of `attention`."""
    if softcap is not None:
        return "ATen has no softcap"
    if sinks is not None:
        return "ATen has no sinks"
    if seed is not None and dropout_prob > 0.0:
        return "ATen draws its own dropout mask and takes no seed"
    if bias is not None and not query.is_cpu and bias.dtype != query.dtype and query.device.type == "cuda":
        return f"ATen's CUDA kernels take a bias in the query's dtype {query.dtype}, not {bias.dtype}"
    return None


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
) -> torch.Tensor:
    """(B, T, H, D), (B, S, K, D), (B, S, K, Dv) -> (B, T, H, Dv); the dropout mask is ATen's own.

    Raises `NotImplementedError` with the reason where `supports` gives one.
    """
    banded = mask is bias is query_segment_ids is key_segment_ids is None
    # checked one by one: most calls have none of these, and building their record takes as long as a small matmul
    if banded and not dropout_prob and softcap is None and sinks is None:
        check_tensors(query, key, value)
        call = None
    else:
        call = resolve(
            query, key, value, mask=mask, bias=bias, causal=causal, query_segment_ids=query_segment_ids,
            key_segment_ids=key_segment_ids, sliding_window=sliding_window, softcap=softcap, sinks=sinks,
            dropout_prob=dropout_prob, seed=seed, draw=False,
        )  # fmt: skip
        if not (bias is sinks is None and softcap is None and seed is None):
            refusal = supports(query, key, value, **call._asdict())
            if refusal is not None:
                raise NotImplementedError(refusal)
    length, keys = query.shape[1], key.shape[1]
    if softmax_scale is not None and softmax_scale <= 0.0:
        query, softmax_scale = positive_scale(query, softmax_scale)
    if bias is not None:
        bias = addend(bias, query)
    plain = banded and sliding_window is None
    if plain and causal and length == 1:
        causal = False  # the one query is aligned with the last key: it sees them all
    attn_mask: torch.Tensor | None = None
    empty_rows, causal_flag = None, False
    # ATen aligns causal to the first query and key, so its own flag fits only where the lengths agree. A branch, as the
    # comparison itself, compiled for any length, is a SymBool, which ATen does not take.
    if plain and causal and length == keys:
        causal_flag = True
    elif banded and (causal or not plain) and keeps(length, keys, query.device):
        left, right = band_of(causal, sliding_window)
        if left is not None or right is not None:
            attn_mask = kept_scores(length, keys, left, right, query.dtype)
    elif causal or not plain:
        if call is None:
            left, right = band_of(causal, sliding_window)
            call = AttentionCall(left=left, right=right)
        attn_mask, empty_rows = _lower(query, visible(call, length, keys, query.device), bias)
    query, key, value = readable(query), readable(key), readable(value)
    grouped = False
    if query.shape[2] != key.shape[2]:  # likewise: compiled for any number of heads, or traced, it is no bool
        grouped = True
    output = fused(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2),
        attn_mask=attn_mask, dropout_p=dropout_prob, is_causal=causal_flag, scale=softmax_scale,
        enable_gqa=grouped,
    )  # fmt: skip
    if empty_rows is not None:
        output = torch.where(empty_rows, 0.0, output)
    return output.transpose(1, 2)


def positive_scale(query: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
    """The same scores with a positive scale: ATen's kernels apply the causal mask before they multiply by it."""
    return (-query, -scale) if scale < 0.0 else (query * scale, 1.0)


def addend(bias: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """The bias in a dtype that ATen's CPU kernels add to scores: the query's, or that of the scores themselves.

    Other dtypes are refused or, for float32 with a float64 query, misread.
    """
    return bias if bias.dtype == query.dtype else bias.to(working_dtype(query))


def _lower(
    query: torch.Tensor, seen: torch.Tensor | None, bias: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """ATen's one `attn_mask` (boolean, or floating with -inf) and, off the CPU, the rows that see nothing.

    On the CPU every ATen path gives such a row zeros and finite gradients (tests/kernels/attention/test_aten.py).
    The CUDA kernels disagree among themselves, so there the row sees everything and its output is replaced.
    """
    attn_mask = seen
    if bias is not None:
        bias = bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape))
        attn_mask = bias if seen is None else torch.where(seen, bias, float("-inf"))
    if attn_mask is None:
        return None, None
    if attn_mask.dim() < 4:
        attn_mask = attn_mask.reshape((1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape))
    if query.is_cpu:
        return attn_mask, None
    boolean = attn_mask.dtype == torch.bool
    empty_rows = ~(attn_mask if boolean else attn_mask > float("-inf")).any(dim=-1, keepdim=True)
    return torch.where(empty_rows, True if boolean else 0.0, attn_mask), empty_rows
