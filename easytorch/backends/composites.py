"""Decompositions of composite operations, for backends that do not implement them directly."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from easytorch.backends.dtypes import DType
from easytorch.backends.shapes import Shape
from easytorch.backends.types import OpType

if TYPE_CHECKING:
    from easytorch.backends.builder import Builder
    from easytorch.backends.graph import Op


def is_composite(op_type: OpType) -> bool:
    """Whether the operation has a decomposition, so that a backend need not implement it."""
    return op_type in _DECOMPOSITIONS


def decompose(
    builder: Builder, op_type: OpType, inputs: tuple[Op, ...], attributes: Mapping[str, Any]
) -> tuple[Op, ...]:
    """The composite operation, expressed by others."""
    return (_DECOMPOSITIONS[op_type](builder, *inputs, **attributes),)


def _like(b: Builder, x: Op, value: float) -> Op:
    return b.constant(np.array(value, x.shape.dtype.numpy))


def _over(b: Builder, x: Op, reduced: Op, axes: tuple[int, ...]) -> Op:
    """`reduced` (x without `axes`) under x's shape again."""
    kept = [axis for axis in range(x.shape.rank) if axis not in axes]
    return b.broadcast_in_dim(reduced, x.shape, kept)


def _wide(b: Builder, x: Op) -> Op:
    """Narrow floats are computed in float32, as torch and XLA do inside these operations."""
    return b.convert_dtype(x, DType.FLOAT32) if x.shape.dtype.is_float and x.shape.dtype.size < 4 else x


def _softmax(b: Builder, x: Op, axis: int) -> Op:
    wide = _wide(b, x)
    powers = b.exp(b.sub(wide, _over(b, wide, b.reduce_max(wide, axis), (axis,))))
    result = b.div(powers, _over(b, wide, b.reduce_sum(powers, axis), (axis,)))
    return result if wide is x else b.convert_dtype(result, x.shape.dtype)


def _layer_norm(b: Builder, x: Op, scale: Op, offset: Op, axes: tuple[int, ...], epsilon: float) -> Op:
    wide = _wide(b, x)
    count = _like(b, wide, math.prod(x.shape.dimensions[axis] for axis in axes))
    centered = b.sub(wide, _over(b, wide, b.div(b.reduce_sum(wide, *axes), count), axes))
    variance = b.div(b.reduce_sum(b.mul(centered, centered), *axes), count)
    normed = b.mul(centered, _over(b, wide, b.rsqrt(b.add(variance, _like(b, wide, epsilon))), axes))
    scale, offset = (b.broadcast_in_dim(_wide(b, p), wide.shape, axes) for p in (scale, offset))
    result = b.add(b.mul(normed, scale), offset)
    return result if wide is x else b.convert_dtype(result, x.shape.dtype)


def _gelu(b: Builder, x: Op, approximate: bool) -> Op:
    wide = _wide(b, x)
    if approximate:
        cube = b.mul(b.mul(wide, wide), wide)
        inner = b.mul(b.add(wide, b.mul(cube, _like(b, wide, 0.044715))), _like(b, wide, math.sqrt(2 / math.pi)))
        share = b.tanh(inner)
    else:
        share = b.erf(b.mul(wide, _like(b, wide, math.sqrt(0.5))))
    result = b.mul(b.mul(wide, _like(b, wide, 0.5)), b.add(share, _like(b, wide, 1.0)))
    return result if wide is x else b.convert_dtype(result, x.shape.dtype)


def _attention(
    b: Builder, query: Op, key: Op, value: Op, mask: Op | None = None, *, is_causal: bool, scale: float | None
) -> Op:
    batch, count, length, size = query.shape.dimensions
    groups, keys = key.shape.dimensions[1:3]
    scale = size**-0.5 if scale is None else scale
    wide = _wide(b, query)
    grouped = b.reshape(wide, batch, groups, count // groups, length, size)
    scores = b.dot_general(grouped, (4,), (0, 1), _wide(b, key), (3,), (0, 1))
    scores = b.mul(b.reshape(scores, batch, count, length, keys), _like(b, scores, scale))
    allowed = None
    if is_causal:
        square = Shape(DType.INT32, (length, keys))
        allowed = b.broadcast_in_dim(
            b.greater_or_equal(b.iota(square, 0), b.iota(square, 1)),
            scores.shape.with_dtype(DType.BOOL),
            (2, 3),
        )
    if mask is not None:
        start = 4 - mask.shape.rank
        spread = b.broadcast_in_dim(mask, scores.shape.with_dtype(mask.shape.dtype), tuple(range(start, 4)))
        if mask.shape.dtype is DType.BOOL:
            allowed = spread if allowed is None else b.logical_and(allowed, spread)
        else:
            scores = b.add(scores, b.convert_dtype(spread, scores.shape.dtype))
    lowest = _like(b, scores, -math.inf)
    if allowed is not None:
        scores = b.where(allowed, scores, lowest)
    greatest = b.reduce_max(scores, 3)
    if mask is not None:
        # A row with nothing to attend has -inf for its greatest score: zero is taken off instead, and it sums to zero.
        greatest = b.where(b.equal(greatest, lowest), _like(b, scores, 0.0), greatest)
    powers = b.exp(b.sub(scores, _over(b, scores, greatest, (3,))))
    total = b.reduce_sum(powers, 3)
    if mask is not None:
        total = b.where(b.equal(total, _like(b, scores, 0.0)), _like(b, scores, 1.0), total)
    weights = b.div(powers, _over(b, scores, total, (3,)))
    weights = b.reshape(weights, batch, groups, count // groups, length, keys)
    mixed = b.dot_general(weights, (4,), (0, 1), _wide(b, value), (2,), (0, 1))
    result = b.reshape(mixed, batch, count, length, value.shape.dimensions[3])
    return b.convert_dtype(result, query.shape.dtype) if result.shape.dtype != query.shape.dtype else result


_DECOMPOSITIONS: dict[OpType, Callable[..., Any]] = {
    OpType.SOFTMAX: _softmax,
    OpType.LAYER_NORM: _layer_norm,
    OpType.GELU: _gelu,
    OpType.SCALED_DOT_PRODUCT_ATTENTION: _attention,
}
