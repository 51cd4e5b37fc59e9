"""Decoding attention by the C++ operator: a key is read once for the heads that share it (cpu*.cpp here)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.attention.layout import matrix_of
from easytorch.kernels.cpu import inference, library
from easytorch.kernels.cpu.inference import DTYPES, side_by_side
from easytorch.kernels.decode.contract import resolve, without_dropout
from easytorch.kernels.interop.torch_func import as_given
from easytorch.kernels.linear import preference

_FLOATS = frozenset(DTYPES)
# Passed for an absent argument: the operator takes tensors only.
_NO_MASK, _NO_NUMBERS, _NO_LENGTHS = (torch.empty(0, dtype=dtype) for dtype in (torch.bool, torch.float32, torch.int64))


def supports(query: Tensor, key: Tensor, value: Tensor, features: Mapping[str, Any]) -> str | None:
    """None when `decode` carries this call, else the reason. Asking may build the library."""
    # `resolve` refuses what is no tensor or has another dtype
    if query.dtype == torch.float64:
        return f"it computes in float32, bfloat16 and float16, got {query.dtype}"
    if (reason := without_dropout(features)) is not None:
        return reason
    return inference.refusal((query, key, value, features.get("bias"), features.get("sinks")))


def prefers(query: Tensor, key: Tensor, value: Tensor, features: Mapping[str, Any]) -> bool:
    """True where `decode` is faster than ATen and carries this call of one query. It may build the library."""
    shape = query.shape
    return (
        len(shape) == 4
        and shape[1] == 1
        and key.dim() == 4
        and preference.BFLOAT16_DOT_PRODUCTS  # where it was measured
        and query.is_cpu
        and supports(query, key, value, features) is None
    )


def decode(query: Tensor, key: Tensor, value: Tensor, *, lengths: Tensor | None = None, **features: Any) -> Tensor:
    """(B, 1, H, D), (B, S, K, D), (B, S, K, Dv), lengths (B,) -> (B, 1, H, Dv) in the query's dtype.

    Raises `NotImplementedError` with the reason where `supports` gives one, `ValueError` for a length beyond 0..S.
    """
    call = resolve(query, key, value, lengths, supports=supports, **features)
    return run(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), lengths, call, library.BEST)


def run(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, call: AttentionCall, level: int
) -> Tensor:  # fmt: skip
    """query (B, H, 1, D), key (B, K, S, D), value (B, K, S, Dv) -> (B, 1, H, Dv) of a resolved call."""
    batch, heads, keys = query.shape[0], query.shape[1], key.shape[2]
    mask = call.mask
    if call.query_segment_ids is not None and call.key_segment_ids is not None:
        same = (call.query_segment_ids == call.key_segment_ids)[:, None, None]
        mask = same if mask is None else mask & same
    scores = (batch, heads, 1, keys)
    return torch.ops.easytorch_cpu.decode.default(
        query,
        side_by_side(key),
        side_by_side(value),
        _NO_MASK if mask is None else _matrix(mask, scores),
        _NO_NUMBERS if call.bias is None else _matrix(_number(call.bias), scores),
        _NO_NUMBERS if call.sinks is None else _number(call.sinks).contiguous(),
        _NO_LENGTHS if lengths is None else lengths.to(torch.int64),
        call.scale,
        0.0 if call.softcap is None else call.softcap,
        -1 if call.left is None else call.left,
        level,
    )


def takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """True where `one_token` may be called right away, for a `contract.plain_token`. It may build the library."""
    # the checks of `inference.refusal` for plain tensors: this runs at each layer of each token
    return (
        query.dtype in _FLOATS
        and not (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad))
        and as_given()
        and library.missing() is None
    )


def one_token(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """query (B, H, 1, D), key (B, K, S, D), value (B, K, S, Dv) -> (B, 1, H, Dv): `run` of a call without features."""
    output: Tensor = torch.ops.easytorch_cpu.decode.default(
        query, key, value, _NO_MASK, _NO_NUMBERS, _NO_NUMBERS, _NO_LENGTHS, scale, 0.0, -1, library.BEST
    )
    return output


def _matrix(tensor: Tensor, scores: tuple[int, ...]) -> Tensor:
    matrix = matrix_of(tensor)
    assert matrix is not None
    return matrix.expand(scores)


def _number(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in _FLOATS else tensor.to(torch.float32)
