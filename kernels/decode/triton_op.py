"""Decoding attention in Triton, for CUDA (compute capability 8.0 and later) and ROCm; forward only. See contract.py.

Nothing here imports Triton until a kernel is launched; with TRITON_INTERPRET=1 set before that they run on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.attention.call import flatten, schema, unflatten
from easytorch.kernels.decode.contract import forward_only, resolve
from easytorch.kernels.decode.triton_tuning import rows_of_group, splits_of, tiles_of
from easytorch.kernels.interop.triton_devices import TOO_OLD, architecture_of, processors, refusal

MAX_HEAD_DIM = 256


def supports(query: Tensor, key: Tensor, value: Tensor, features: Mapping[str, Any]) -> str | None:
    """None when `decode` carries this call, else the reason."""
    if (reason := forward_only(query, key, value, features)) is not None:
        return reason
    for name, dim in (("query and key", query.shape[-1]), ("value", value.shape[-1])):
        if not 1 <= dim <= MAX_HEAD_DIM:
            return f"the head_dim of {name} must be in 1..{MAX_HEAD_DIM}, got {dim}"
    return refusal(query.device, query.dtype)


def decode(query: Tensor, key: Tensor, value: Tensor, *, lengths: Tensor | None = None, **features: Any) -> Tensor:
    """(B, 1, H, D), (B, S, K, D), (B, S, K, Dv), lengths (B,) -> (B, 1, H, Dv) in the query's dtype.

    Strides are followed, mask and bias broadcast without copies; keys beyond `lengths` or left of the window are not
    read. A length beyond 0..S counts as the nearest of them. Raises `NotImplementedError` for what `supports` refuses.
    """
    call = resolve(query, key, value, lengths, supports=supports, **features)
    return _decode(query, key, value, lengths, *flatten(call))


@torch.library.custom_op(
    "easytorch::triton_decode", mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, Tensor? lengths, {schema()}) -> Tensor",
)  # fmt: skip
def _decode(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, *fields: Any) -> Tensor:
    from easytorch.kernels.decode import triton_calls as calls

    architecture = architecture_of(query.device)
    if architecture is None:
        raise ValueError(f"triton decode: {TOO_OLD}")
    call = unflatten(fields)
    output = _decode_fake(query, key, value)
    if output.numel() == 0:
        return output
    batch, _, heads, _ = query.shape
    keys, kv_heads = key.shape[1:3]
    programs = batch * kv_heads * -(-(heads // kv_heads) // rows_of_group(heads // kv_heads))
    reach = keys if call.left is None else min(keys, call.left + 1)
    splits = splits_of(programs, reach, tiles_of(architecture, query, value).block_n, processors(query.device))
    if splits == 1:
        calls.split_call(architecture, query, key, value, output, None, 1, lengths, call).launch()
        return output
    parts, lse = (
        torch.empty((batch, heads, *shape), dtype=torch.float32, device=query.device)
        for shape in ((splits, value.shape[3]), (2, splits))
    )
    calls.split_call(architecture, query, key, value, parts, lse, splits, lengths, call).launch()
    calls.merge_call(parts, lse, output, call).launch()
    return output


@_decode.register_fake
def _decode_fake(query: Tensor, key: Tensor, value: Tensor, *fields: Any) -> Tensor:
    batch, length, heads, _ = query.shape
    return torch.empty((batch, length, heads, value.shape[3]), dtype=query.dtype, device=query.device)
