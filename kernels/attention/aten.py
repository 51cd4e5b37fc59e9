"""Attention by ATen's `scaled_dot_product_attention`, which picks its own fused kernel. See contract.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from easytorch.kernels.attention.aten_fused import fused
from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.attention.contract import band_of, check_tensors, keeps, kept_scores, only_band, resolve, visible
from easytorch.kernels.attention.layout import readable
from easytorch.kernels.attention.native import working_dtype


def supports(query: torch.Tensor, features: Mapping[str, Any]) -> str | None:
    """None, or the part of the call that ATen cannot express. features: of a call, or the fields of its record."""
    bias = features.get("bias")
    if features.get("softcap") is not None:
        return "ATen has no softcap"
    if features.get("sinks") is not None:
        return "ATen has no sinks"
    if features.get("seed") is not None and features.get("dropout_prob", 0.0) > 0.0:
        return "ATen draws its own dropout mask and takes no seed"
    if bias is not None and not query.is_cpu and bias.dtype != query.dtype and query.device.type == "cuda":
        return f"ATen's CUDA kernels take a bias in the query's dtype {query.dtype}, not {bias.dtype}"
    return None


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **features: Any) -> torch.Tensor:
    """(B, T, H, D), (B, S, K, D), (B, S, K, Dv) -> (B, T, H, Dv); the dropout mask is ATen's own.

    Raises `NotImplementedError` with the reason where `supports` gives one.
    """
    bias, dropout_prob, softmax_scale = None, 0.0, features.get("softmax_scale")
    if only_band(features):
        check_tensors(query, key, value)
        left, right = band_of(features.get("causal", False), features.get("sliding_window"))
        call, banded = None, True
    else:
        call = resolve(query, key, value, **features, draw=False)
        if (reason := supports(query, call._asdict())) is not None:
            raise NotImplementedError(reason)
        left, right, bias, dropout_prob = call.left, call.right, call.bias, call.dropout_prob
        banded = call.mask is bias is call.query_segment_ids is None
    length, keys = query.shape[1], key.shape[1]
    if softmax_scale is not None and softmax_scale <= 0.0:
        query, softmax_scale = positive_scale(query, softmax_scale)
    if bias is not None:
        bias = addend(bias, query)
    causal = banded and left is None and right == 0
    if causal and length == 1:
        causal, right = False, None  # the one query is aligned with the last key: it sees them all
    attn_mask: torch.Tensor | None = None
    empty_rows, causal_flag = None, False
    # ATen aligns causal to the first query and key, so its own flag fits only where the lengths agree. A branch, as the
    # comparison itself, compiled for any length, is a SymBool, which ATen does not take.
    if causal and length == keys:
        causal_flag = True
    elif banded and left is right is None:
        pass
    elif banded and keeps(length, keys, query.device):
        attn_mask = kept_scores(length, keys, left, right, query.dtype)
    else:
        call = AttentionCall(left=left, right=right) if call is None else call
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
