"""Helpers for lowerings of several families: reading, writing and padding along axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from easytorch.backends.dtypes import DType
from easytorch.backends.graph import Op
from easytorch.backends.shapes import Shape
from easytorch.backends.types import PadAxis
from easytorch.frontend.context import Context


def cut(ctx: Context, x: Op, axis: int, start: int, limit: int, stride: int = 1) -> Op:
    """The elements from `start` up to before `limit` along `axis`, every `stride`-th."""
    starts, limits, strides = [0] * x.shape.rank, list(x.shape.dimensions), [1] * x.shape.rank
    starts[axis], limits[axis], strides[axis] = start, limit, stride
    return ctx.builder.slice(x, starts, limits, strides)


def pad(ctx: Context, x: Op, pads: Mapping[int, PadAxis], value: Any = 0) -> Op:
    """x with `value` around and between its elements, by axis; negative pads crop."""
    if all(config == PadAxis() for config in pads.values()):
        return x
    config = [pads.get(axis, PadAxis()) for axis in range(x.shape.rank)]
    return ctx.builder.pad(x, ctx.scalar(value, x.shape.dtype), *config)


def take(ctx: Context, x: Op, axis: int, indices: Op | np.ndarray) -> Op:
    """The slices of x at in-bounds `indices` along `axis`, which is replaced by the axes of `indices`."""
    where = ctx.constant(indices.astype(np.int32)) if isinstance(indices, np.ndarray) else indices
    count = where.shape.rank
    if not where.shape.size:
        # Of an axis without elements too, of which no slice could be taken.
        dimensions = (*x.shape.dimensions[:axis], *where.shape.dimensions, *x.shape.dimensions[axis + 1 :])
        return ctx.full(dimensions, 0, x.shape.dtype)
    kept = [number for number in range(x.shape.rank) if number != axis]
    return ctx.builder.gather(
        x,
        where,
        count,
        [number if number < axis else number + count - 1 for number in kept],
        (axis,),
        (axis,),
        [1 if number == axis else size for number, size in enumerate(x.shape.dimensions)],
    )


def scatter_along(ctx: Context, x: Op, axis: int, indices: Op | np.ndarray, updates: Op) -> Op:
    """x with `updates` added at `indices` along `axis`; their shape is that of `take`'s result."""
    where = ctx.constant(indices.astype(np.int32)) if isinstance(indices, np.ndarray) else indices
    count = where.shape.rank
    kept = [number for number in range(x.shape.rank) if number != axis]
    windows = [number if number < axis else number + count - 1 for number in kept]
    return ctx.builder.scatter_sum(x, where, updates, count, windows, (axis,), (axis,))


def along(ctx: Context, x: Op | np.ndarray, dimensions: Sequence[int], axis: int) -> Op:
    """The vector x along `axis` of an array of `dimensions`."""
    vector = ctx.constant(x) if isinstance(x, np.ndarray) else x
    return ctx.builder.broadcast_in_dim(vector, Shape(vector.shape.dtype, tuple(dimensions)), (axis,))


def move(ctx: Context, x: Op, source: Sequence[int], target: Sequence[int]) -> Op:
    """x with the axes `source` at `target` and the others in their order."""
    order = [axis for axis in range(x.shape.rank) if axis not in source]
    for place, axis in sorted(zip(target, source, strict=True)):
        order.insert(place, axis)
    return ctx.transpose(x, order)


def wrapped(ctx: Context, indices: Op, size: int) -> Op:
    """Indices with negative ones counted from the end."""
    zero, length = ctx.scalar(0, indices.shape.dtype), ctx.scalar(size, indices.shape.dtype)
    if indices.shape.dtype is DType.UINT8:
        return indices
    return ctx.builder.where(ctx.builder.less_than(indices, zero), ctx.builder.add(indices, length), indices)


def lowest(dtype: DType) -> Any:
    """The smallest value of `dtype`, -inf for floats."""
    if dtype is DType.BOOL:
        return False
    return -math.inf if dtype.is_float else int(np.iinfo(dtype.numpy).min)


def highest(dtype: DType) -> Any:
    """The largest value of `dtype`, inf for floats."""
    if dtype is DType.BOOL:
        return True
    return math.inf if dtype.is_float else int(np.iinfo(dtype.numpy).max)


def is_nan(ctx: Context, x: Op) -> Op | None:
    """A bool mask of the NaNs of x; None for dtypes without NaN."""
    return ctx.builder.is_nan(x) if x.shape.dtype.is_float else None


def at_least_1d(ctx: Context, x: Op) -> Op:
    """x, or of a scalar a vector of one."""
    return x if x.shape.rank else ctx.reshape(x, (1,))
