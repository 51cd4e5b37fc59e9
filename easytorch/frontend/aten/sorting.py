"""Sorting and what follows from it: the k greatest, medians, the k-th."""

from __future__ import annotations

import torch

from easytorch.backends.builder import Builder
from easytorch.backends.dtypes import DType
from easytorch.backends.graph import Op
from easytorch.backends.shapes import Shape
from easytorch.frontend.arrays import cut, highest, is_nan, move, take
from easytorch.frontend.context import Context
from easytorch.frontend.registry import lowering

aten = torch.ops.aten


def sorted_along(ctx: Context, x: Op, axis: int, descending: bool) -> tuple[Op, Op]:
    """The elements of x in order along `axis`, and where each was; equal ones keep their order, NaN is greatest."""

    def before(b: Builder, one: Op, other: Op, place: Op, other_place: Op) -> Op:
        ordered = b.greater_than(one, other) if descending else b.less_than(one, other)
        if not x.shape.dtype.is_float:
            return ordered
        nan, other_nan = b.is_nan(one), b.is_nan(other)
        if not descending:
            nan, other_nan = other_nan, nan
        first = b.logical_and(nan, b.logical_not(other_nan))
        return b.logical_or(ordered, first)

    values, places = ctx.builder.sort(before, axis, True, x, ctx.iota(x.shape.dimensions, axis, DType.INT64))
    return values, places


@lowering(aten.sort.default)
def sort(ctx: Context, x: Op, dim: int = -1, descending: bool = False) -> tuple[Op, Op]:
    if not x.shape.rank:
        return x, ctx.scalar(0, DType.INT64)
    return sorted_along(ctx, x, ctx.axis(dim, x.shape.rank), descending)


@lowering(aten.sort.stable)
def sort_stable(
    ctx: Context, x: Op, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Op, Op]:
    return sort(ctx, x, dim, descending)


@lowering(aten.argsort.default)
def argsort(ctx: Context, x: Op, dim: int = -1, descending: bool = False) -> Op:
    return sort(ctx, x, dim, descending)[1]


@lowering(aten.argsort.stable)
def argsort_stable(ctx: Context, x: Op, *, stable: bool = True, dim: int = -1, descending: bool = False) -> Op:
    return sort(ctx, x, dim, descending)[1]


@lowering(aten.topk.default)
def topk(ctx: Context, x: Op, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Op, ...]:
    if not x.shape.rank:
        return x, ctx.scalar(0, DType.INT64)
    axis = ctx.axis(dim, x.shape.rank)
    return tuple(cut(ctx, part, axis, 0, k) for part in sorted_along(ctx, x, axis, largest))


def _ranked(ctx: Context, x: Op, dim: int, position: int, keepdim: bool) -> tuple[Op, ...]:
    """The element at `position` in order, and its place."""
    if not x.shape.rank:
        return x, ctx.scalar(0, DType.INT64)
    axis = ctx.axis(dim, x.shape.rank)
    found = [cut(ctx, part, axis, position, position + 1) for part in sorted_along(ctx, x, axis, False)]
    if keepdim:
        return tuple(found)
    rest = [size for number, size in enumerate(x.shape.dimensions) if number != axis]
    return tuple(ctx.reshape(part, rest) for part in found)


@lowering(aten.kthvalue.default)
def kthvalue(ctx: Context, x: Op, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Op, ...]:
    return _ranked(ctx, x, dim, k - 1, keepdim)


@lowering(aten.median.dim, aten.nanmedian.dim)
def median_dim(ctx: Context, x: Op, dim: int, keepdim: bool = False) -> tuple[Op, ...]:
    """The lower of two in the middle. median: NaN where there is one; nanmedian: of the numbers alone."""
    b = ctx.builder
    if not x.shape.rank:
        return x, ctx.scalar(0, DType.INT64)
    axis = ctx.axis(dim, x.shape.rank)
    size = x.shape.dimensions[axis]
    nan = is_nan(ctx, x)
    if nan is None:
        return _ranked(ctx, x, dim, (size - 1) // 2, keepdim)
    values, places = sorted_along(ctx, x, axis, False)
    nans = ctx.reduce(b.reduce_sum, ctx.cast(nan, DType.INT64), (axis,), True)
    if ctx.node is not None and ctx.node.target is aten.nanmedian.dim:
        middle = b.div(b.sub(ctx.scalar(size - 1, DType.INT64), nans), ctx.scalar(2, DType.INT64))
        wanted = b.max(middle, ctx.scalar(0, DType.INT64))
    else:
        # NaN stand last: the first of them, if there is one.
        first = b.sub(ctx.scalar(size, DType.INT64), nans)
        wanted = b.where(b.equal(nans, ctx.scalar(0, DType.INT64)), ctx.scalar((size - 1) // 2, DType.INT64), first)
    at = b.equal(ctx.iota(x.shape.dimensions, axis, DType.INT64), ctx.expand(wanted, x.shape.dimensions))
    value = b.reduce_max(b.where(at, values, ctx.scalar(float("-inf"), x.shape.dtype)), axis)
    place = b.reduce_max(b.where(at, places, ctx.scalar(0, DType.INT64)), axis)
    if keepdim:
        return ctx.keep(value, x, (axis,)), ctx.keep(place, x, (axis,))
    return value, place


@lowering(aten.median.default, aten.nanmedian.default)
def median(ctx: Context, x: Op) -> Op:
    flat = ctx.reshape(x, (x.shape.size,))
    if not x.shape.size:
        return ctx.scalar(float("nan"), x.shape.dtype)
    b, size = ctx.builder, x.shape.size
    nan = is_nan(ctx, flat)
    values, _ = sorted_along(ctx, flat, 0, False)
    middle = ctx.reshape(cut(ctx, values, 0, (size - 1) // 2, (size - 1) // 2 + 1), ())
    if nan is None:
        return middle
    nans = b.reduce_sum(ctx.cast(nan, DType.INT64))
    if ctx.node is not None and ctx.node.target is aten.nanmedian.default:
        wanted = b.div(b.sub(ctx.scalar(size - 1, DType.INT64), nans), ctx.scalar(2, DType.INT64))
        return take(ctx, values, 0, b.max(wanted, ctx.scalar(0, DType.INT64)))
    return b.where(b.reduce_logical_or(nan), ctx.scalar(float("nan"), x.shape.dtype), middle)


@lowering(aten.mode.default)
def mode(ctx: Context, x: Op, dim: int = -1, keepdim: bool = False) -> tuple[Op, ...]:
    """The most frequent element, the least of several, and where it stands last."""
    b = ctx.builder
    if not x.shape.rank:
        return x, ctx.scalar(0, DType.INT64)
    axis, rank = ctx.axis(dim, x.shape.rank), x.shape.rank
    ordered = ctx.cast(x, DType.INT8) if x.shape.dtype is DType.BOOL else x
    last = move(ctx, ordered, (axis,), (rank - 1,))
    dimensions = last.shape.dimensions
    square = Shape(ordered.shape.dtype, (*dimensions, dimensions[-1]))
    rows = b.broadcast_in_dim(last, square, range(rank))
    columns = b.broadcast_in_dim(last, square, (*range(rank - 1), rank))
    counts = b.reduce_sum(ctx.cast(b.equal(rows, columns), DType.INT64), rank)
    frequent = b.equal(counts, ctx.expand(ctx.reduce(b.reduce_max, counts, -1, True), dimensions))
    top = ctx.scalar(highest(ordered.shape.dtype), ordered.shape.dtype)
    value = ctx.reduce(b.reduce_min, b.where(frequent, last, top), -1, True)
    here = b.equal(last, ctx.expand(value, dimensions))
    places = ctx.iota(dimensions, rank - 1, DType.INT64)
    place = ctx.reduce(b.reduce_max, b.where(here, places, ctx.scalar(0, DType.INT64)), -1)
    found = ctx.cast(ctx.reshape(value, dimensions[:-1]), x.shape.dtype), place
    return tuple(ctx.keep(part, x, (axis,)) for part in found) if keepdim else found
