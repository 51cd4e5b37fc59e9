"""Attention of many queries by the operator in C++ (cpu*.cpp here): tiles of scores in float32 that stay in the caches,
products of bfloat16 by dot products where the CPU has them. Inference only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.attention.contract import resolve
from easytorch.kernels.attention.layout import matrix_of
from easytorch.kernels.cpu import library
from easytorch.kernels.cpu.inference import DTYPES, refusal, side_by_side

# A band without an end, as the operator takes it.
FARTHEST = 2**48
# Passed for an absent argument: the operator takes tensors only.
_NO_MASK, _NO_NUMBERS = (torch.empty(0, dtype=dtype) for dtype in (torch.bool, torch.float32))


def supports(query: Tensor, key: Tensor, value: Tensor, features: Mapping[str, Any]) -> str | None:
    """None when `attention` carries this call, else the reason. Asking may build the library."""
    # `resolve` refuses what is no tensor or has another dtype
    if query.dtype == torch.float64:
        return f"it computes in float32, bfloat16 and float16, got {query.dtype}"
    if features.get("dropout_prob", 0.0) > 0.0:
        return "it has no dropout"
    if features.get("query_segment_ids") is not None:
        return "segments are ATen's, which skips the tiles between them"
    return refusal((query, key, value, features.get("bias"), features.get("sinks")))


def attention(query: Tensor, key: Tensor, value: Tensor, **features: Any) -> Tensor:
    """(B, T, H, D), (B, S, K, D), (B, S, K, Dv) -> (B, T, H, Dv), in the query's dtype.

    Raises `NotImplementedError` with the reason where `supports` gives one.
    """
    call = resolve(query, key, value, **features)
    if (reason := supports(query, key, value, features)) is not None:
        raise NotImplementedError(f"attention: {reason}")
    return run(query, key, value, call, library.BEST)


def run(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, level: int) -> Tensor:
    """`attention` of a resolved call."""
    scores = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    output: Tensor = torch.ops.easytorch_cpu.flash.default(
        side_by_side(query),
        side_by_side(key),
        side_by_side(value),
        _NO_MASK if call.mask is None else _matrix(call.mask, scores),
        _NO_NUMBERS if call.bias is None else _matrix(_numbers(call.bias), scores),
        _NO_NUMBERS if call.sinks is None else _numbers(call.sinks).contiguous(),
        call.scale,
        0.0 if call.softcap is None else call.softcap,
        FARTHEST if call.left is None else call.left,
        FARTHEST if call.right is None else call.right,
        level,
    )
    return output


def _matrix(tensor: Tensor, scores: tuple[int, ...]) -> Tensor:
    matrix = matrix_of(tensor)
    assert matrix is not None
    return matrix.expand(scores)


def _numbers(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in DTYPES else tensor.to(torch.float32)
