"""Decoding attention in Triton, for CUDA (compute capability 8.0 and later) and ROCm; forward only. See contract.py.

Nothing here imports Triton until a kernel is launched; with TRITON_INTERPRET=1 set before that they run on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.attention.contract import band_of
from easytorch.kernels.decode.contract import check_decode
from easytorch.kernels.decode.triton_decode_tuning import rows_of_group, splits_of, tiles_of
from easytorch.kernels.interop.torch_func import recording
from easytorch.kernels.interop.triton_devices import TOO_OLD, architecture_of, processors, refusal

MAX_HEAD_DIM = 256


def supports(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_prob: float = 0.0,
    **_: Any,
) -> str | None:
    """None when `decode` carries this call, else the reason. Takes the arguments of `decode`."""
    if dropout_prob > 0.0:
        return "it has no dropout"
    if recording(query, key, value, bias, sinks):
        return "it computes no gradients, and one is asked for"
    for name, dim in (("query and key", query.shape[-1]), ("value", value.shape[-1])):
        if not 1 <= dim <= MAX_HEAD_DIM:
            return f"the head_dim of {name} must be in 1..{MAX_HEAD_DIM}, got {dim}"
    return refusal(query.device, query.dtype)


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
) -> Tensor:
    """(B, 1, H, D), (B, S, K, D), (B, S, K, Dv), lengths (B,) -> (B, 1, H, Dv) in the query's dtype.

    Strides are followed, mask and bias broadcast without copies; keys beyond `lengths` or left of the window are not
    read. A length beyond 0..S counts as the nearest of them. Raises `ValueError` for what `supports` refuses.
    """
    dim = check_decode(
        query, key, value, lengths, mask=mask, bias=bias, query_segment_ids=query_segment_ids,
        key_segment_ids=key_segment_ids, softcap=softcap, sinks=sinks, dropout_prob=dropout_prob,
    )[4]  # fmt: skip
    if (reason := supports(query, key, value, bias=bias, sinks=sinks, dropout_prob=dropout_prob)) is not None:
        raise ValueError(f"triton decode: {reason}")
    left, _ = band_of(causal, sliding_window)  # the right side never ends before the query's own key, the last
    return _decode(
        query, key, value, bias, mask, query_segment_ids, key_segment_ids, sinks, lengths, left, softcap,
        dim**-0.5 if softmax_scale is None else softmax_scale,
    )  # fmt: skip


@torch.library.custom_op("easytorch::triton_decode", mutates_args=())
def _decode(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, mask: Tensor | None, query_ids: Tensor | None,
    key_ids: Tensor | None, sinks: Tensor | None, lengths: Tensor | None, left: int | None, softcap: float | None,
    scale: float,
) -> Tensor:  # fmt: skip
    from easytorch.kernels.decode import triton_decode_calls as calls

    architecture = architecture_of(query.device)
    if architecture is None:
        raise ValueError(f"triton decode: {TOO_OLD}")
    features = calls.Features(bias, mask, query_ids, key_ids, sinks, lengths, left, softcap, scale)
    output = _decode_fake(query, key, value)
    if output.numel() == 0:
        return output
    batch, _, heads, _ = query.shape
    keys, kv_heads = key.shape[1:3]
    programs = batch * kv_heads * -(-(heads // kv_heads) // rows_of_group(heads // kv_heads))
    reach = keys if left is None else min(keys, left + 1)
    splits = splits_of(programs, reach, tiles_of(architecture, query, value).block_n, processors(query.device))
    if splits == 1:
        calls.split_call(architecture, query, key, value, output, None, 1, features).launch()
        return output
    parts, lse = (
        torch.empty((batch, heads, splits, *rest), dtype=torch.float32, device=query.device)
        for rest in ((value.shape[3],), ())
    )
    calls.split_call(architecture, query, key, value, parts, lse, splits, features).launch()
    calls.merge_call(parts, lse, output, sinks).launch()
    return output


@_decode.register_fake
def _decode_fake(query: Tensor, key: Tensor, value: Tensor, *features: Any) -> Tensor:
    batch, length, heads, _ = query.shape
    return torch.empty((batch, length, heads, value.shape[3]), dtype=query.dtype, device=query.device)
