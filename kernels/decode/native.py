"""The definition of decoding attention: kernels/attention/native.py over the first `lengths` keys. See contract.py."""

from __future__ import annotations

import torch
from torch import Tensor

from easytorch.kernels.attention import native
from easytorch.kernels.attention.contract import band_of, visible
from easytorch.kernels.attention.dropout import draw_seed, keep_mask
from easytorch.kernels.decode.contract import check_decode


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    lengths: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    query_segment_ids: Tensor | None = None,
    key_segment_ids: Tensor | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    seed: int | Tensor | None = None,
    softmax_dtype: torch.dtype | None = None,
) -> Tensor:
    """(B, 1, H, D), (B, S, K, D), (B, S, K, Dv), lengths (B,) -> (B, 1, H, Dv) in the query's dtype.

    Scores and softmax are computed in `softmax_dtype`: float32 by default, float64 for float64 inputs.
    """
    batch, keys, heads, _, dim, _ = check_decode(
        query, key, value, lengths, mask=mask, bias=bias, query_segment_ids=query_segment_ids,
        key_segment_ids=key_segment_ids, softcap=softcap, sinks=sinks, dropout_prob=dropout_prob,
    )  # fmt: skip
    if lengths is None:
        seen = visible(
            1, keys, query.device, mask=mask, causal=causal, query_segment_ids=query_segment_ids,
            key_segment_ids=key_segment_ids, sliding_window=sliding_window,
        )  # fmt: skip
    else:
        seen = visible(
            1, keys, query.device, mask=mask, query_segment_ids=query_segment_ids, key_segment_ids=key_segment_ids
        )
        offset = torch.arange(keys, device=query.device) - lengths[:, None] + 1  # (B, S), 0 at the query's own key
        valid = offset <= 0
        left, right = band_of(causal, sliding_window)
        assert right is None or right >= 0, "the last key is always in reach"
        # selected, not multiplied by zero: what lies beyond may be NaN
        key, value = (torch.where(valid[:, :, None, None], tensor, 0.0) for tensor in (key, value))
        if bias is not None:
            bias = torch.where(valid[:, None, None], bias, 0.0)
        if left is not None:
            valid = valid & (offset >= -left)
        seen = valid[:, None, None] if seen is None else seen & valid[:, None, None]
    keep = None
    if dropout_prob > 0.0:
        keep = keep_mask(draw_seed() if seed is None else seed, dropout_prob, (batch, heads, 1, keys), query.device)
    return native.attend(
        query, key, value, seen=seen, bias=bias, softcap=softcap, sinks=sinks,
        scale=dim**-0.5 if softmax_scale is None else softmax_scale, keep=keep, dropout_prob=dropout_prob,
        working=softmax_dtype or native.working_dtype(query),
    )[0]  # fmt: skip
