"""The arguments of a decoding attention: those of kernels/attention/contract.py with T = 1, and `lengths`.

`lengths` (B,), int32 or int64, each 0..S: only the first lengths[b] keys of sequence b are part of the call. For causal
and the sliding window the query is at the last of them, key lengths[b] - 1. Keys beyond are never read: they may be
NaN. A sequence of length 0 gives zeros. Without `lengths` every sequence has S keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.attention import contract
from easytorch.kernels.attention.call import DIFFERENTIABLE, AttentionCall
from easytorch.kernels.interop.arguments import FLOATS, bounds, check_dense
from easytorch.kernels.interop.arguments import check_tensors as check_devices
from easytorch.kernels.interop.torch_func import recording


def not_one_query(query: Tensor) -> str | None:
    """None for a query (B, 1, H, D), else why decode does not take it."""
    if query.dim() == 4 and query.shape[1] != 1:
        return f"decode takes one query token (T = 1), got T = {query.shape[1]}: use attention"
    return None


def plain_token(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """True of a query (B, H, 1, D), keys (B, K, S, D) and values (B, K, S, Dv) that fit each other and need no look.

    Plain contiguous tensors of one dtype on the CPU, none of them empty, and no graph is compiled.
    """
    if torch.compiler.is_compiling() or not (type(query) is type(key) is type(value) is Tensor):
        return False
    if not (query.is_cpu and key.is_cpu and value.is_cpu and key.is_contiguous() and value.is_contiguous()):
        return False
    q, k, v = query.shape, key.shape, value.shape
    if not len(q) == len(k) == len(v) == 4:
        return False
    batch, heads, length, dim = q
    kv_heads, keys, _ = v[1:]
    if length != 1 or k != (batch, kv_heads, keys, dim) or v[0] != batch or dim == 0 or 0 in v:
        return False
    dtype = query.dtype
    return heads % kv_heads == 0 and dtype in FLOATS and key.dtype == dtype and value.dtype == dtype


Supports = Callable[[Tensor, Tensor, Tensor, Mapping[str, Any]], str | None]


def without_dropout(features: Mapping[str, Any]) -> str | None:
    """The reason of a kernel that has no dropout, for a call with it."""
    return "it has no dropout" if features.get("dropout_prob", 0.0) > 0.0 else None


def forward_only(query: Tensor, key: Tensor, value: Tensor, features: Mapping[str, Any]) -> str | None:
    """The reason of a kernel that has neither dropout nor a gradient, for a call with one of them."""
    if (reason := without_dropout(features)) is not None:
        return reason
    given = (query, key, value, *(features.get(name) for name in DIFFERENTIABLE))
    return "it computes no gradients, and this call needs one" if recording(*given) else None


def resolve(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor | None = None,
    *,
    supports: Supports | None = None,
    **features: Any,
) -> AttentionCall:
    """The call as one record, or an error that names what does not fit.

    supports: a kernel's, whose reason is raised as `NotImplementedError`. The values of `lengths` are checked on the
    host (`interop/arguments.py`): kernels on other devices clamp a length to 0..S.
    """
    call = contract.resolve(query, key, value, **features)
    if (reason := not_one_query(query)) is not None:
        raise ValueError(reason)
    if lengths is not None:
        batch, keys = key.shape[:2]
        check_devices("decode", query=query, lengths=lengths)
        check_dense("decode", lengths=lengths)
        if lengths.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"decode: lengths must be int32 or int64, got {lengths.dtype}")
        if lengths.shape != (batch,):
            raise ValueError(f"decode: lengths must be {(batch,)}, one per sequence, got {tuple(lengths.shape)}")
        limits = bounds(lengths)
        if limits is not None and not 0 <= limits[0] <= limits[1] <= keys:
            raise ValueError(f"decode: lengths must be in 0..{keys}, the keys there are, got {lengths.tolist()}")
    if supports is not None and (reason := supports(query, key, value, features)) is not None:
        raise NotImplementedError(f"decode: {reason}")
    return call


resolve.__qualname__ = "decode"  # the name in TypeErrors: whoever gives a wrong keyword called decode
