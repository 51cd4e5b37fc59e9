"""The definition of decoding attention: kernels/attention/native.py over the first `lengths` keys. See contract.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.attention import native
from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.attention.contract import visible
from easytorch.kernels.attention.dropout import keep_mask
from easytorch.kernels.decode.contract import resolve


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    lengths: Tensor | None = None,
    softmax_dtype: torch.dtype | None = None,
    **features: Any,
) -> Tensor:
    """(B, 1, H, D), (B, S, K, D), (B, S, K, Dv), lengths (B,) -> (B, 1, H, Dv) in the query's dtype.

    Scores and softmax are computed in `softmax_dtype`: float32 by default, float64 for float64 inputs.
    """
    call = resolve(query, key, value, lengths, **features)
    return over_lengths(query, key, value, lengths, call, softmax_dtype)


def over_lengths(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor | None,
    call: AttentionCall,
    softmax_dtype: torch.dtype | None = None,
) -> Tensor:
    """`decode` for a resolved call."""
    batch, _, heads, _ = query.shape
    keys = key.shape[1]
    if lengths is None:
        seen = visible(call, 1, keys, query.device)
    else:
        seen = visible(call._replace(left=None, right=None), 1, keys, query.device)
        offset = torch.arange(keys, device=query.device) - lengths[:, None] + 1  # (B, S), 0 at the query's own key
        valid = offset <= 0
        assert call.right is None or call.right >= 0, "the last key is always in reach"
        # selected, not multiplied by zero: what lies beyond may be NaN
        key, value = (torch.where(valid[:, :, None, None], tensor, 0.0) for tensor in (key, value))
        if call.bias is not None:
            call = call._replace(bias=torch.where(valid[:, None, None], call.bias, 0.0))
        if call.left is not None:
            valid = valid & (offset >= -call.left)
        seen = valid[:, None, None] if seen is None else seen & valid[:, None, None]
    keep = None
    if call.seed is not None:
        keep = keep_mask(call.seed, call.dropout_prob, (batch, heads, 1, keys), query.device)
    working = softmax_dtype or native.working_dtype(query)
    return native.attend(query, key, value, call, seen=seen, keep=keep, working=working)[0]
