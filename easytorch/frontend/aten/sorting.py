"""Sorting and what follows from it: the k greatest, medians, the k-th."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from easytorch.backends.builder import Builder
from easytorch.backends.dtypes import DType
from easytorch.backends.graph import Op
from easytorch.backends.shapes import Shape
from easytorch.backends.types import PadAxis
from easytorch.frontend.arrays import cut, highest, is_nan, move, take
from easytorch.frontend.aten.indexing import gather
from easytorch.frontend.aten.introsort import running_sum, sort_order, topk_order
from easytorch.frontend.context import Context
from easytorch.frontend.registry import lowering

aten = torch.ops.aten
# (builder, (rows, n) ranks) -> the elements of each row in the order ATen leaves them.
Order = Callable[[Builder, Op], Op]
# std::sort leaves so few elements to insertion sort; from so many integers in a vector on ATen takes a radix sort.
_INSERTION, _RADIX = 16, 32768


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


def _as_aten(ctx: Context, x: Op, axis: int, k: int, descending: bool, unstable: Order) -> tuple[Op, Op]:
    """The first k elements of x in order along `axis` and where each was: the stable ones, but where equal elements
    are among or behind them those of ATen on a CPU, which `unstable` gives for ranks.

    Divided over a mesh it is always the stable ones: `unstable` would bring the elements of all devices to each.
    """
    b = ctx.builder
    values, places = sorted_along(ctx, x, axis, descending)
    count = x.shape.dimensions[axis]
    taken = [cut(ctx, part, axis, 0, k) for part in (values, places)]
    if count < 2 or not k or not x.shape.size or b.partitioned:
        return taken[0], taken[1]
    order = [*(other for other in range(x.shape.rank) if other != axis), axis]
    lead = [x.shape.dimensions[other] for other in order[:-1]]
    rows = x.shape.size // count
    lines, line_places = (b.reshape(ctx.transpose(part, order), rows, count) for part in (values, places))
    same = _equal_neighbours(ctx, lines)
    tied = b.reduce_logical_or(cut(ctx, same, 1, 0, min(k, count - 1)))

    def as_aten(inner: Builder) -> Op:
        # Of one more rank than the element before, unless they are equal.
        steps = inner.convert_dtype(inner.logical_not(same), DType.INT32)
        padded = inner.pad(steps, inner.constant(np.int32(0)), PadAxis(), PadAxis(1))
        ranks = running_sum(inner, padded, 1)
        _, by_place = inner.sort(lambda c, p, q, *_: c.less_than(p, q), 1, True, line_places, ranks)
        return inner.convert_dtype(unstable(inner, by_place), DType.INT64)

    def stable(inner: Builder) -> Op:
        return inner.slice(line_places, (0, 0), (rows, k))

    (found,) = b.cond(tied, as_aten, stable)
    back = sorted(range(len(order)), key=order.__getitem__)
    chosen = ctx.transpose(b.reshape(found, *lead, k), back)
    return gather(ctx, x, axis, chosen), chosen


def _equal_neighbours(ctx: Context, lines: Op) -> Op:
    """(rows, n) -> (rows, n - 1) bool: whether an element is equal to the next; NaN is equal to NaN."""
    b, count = ctx.builder, lines.shape.dimensions[1]
    one, other = cut(ctx, lines, 1, 0, count - 1), cut(ctx, lines, 1, 1, count)
    same = b.equal(one, other)
    nan, other_nan = is_nan(ctx, one), is_nan(ctx, other)
    return same if nan is None or other_nan is None else b.logical_or(same, b.logical_and(nan, other_nan))


@lowering(aten.sort.default)
def sort(ctx: Context, x: Op, dim: int = -1, descending: bool = False) -> tuple[Op, Op]:
    if not x.shape.rank:
        return x, ctx.scalar(0, DType.INT64)
    axis = ctx.axis(dim, x.shape.rank)
    count = x.shape.dimensions[axis]
    # Insertion sort, and the radix sort of long vectors of integers, are stable.
    radix = x.shape.rank == 1 and x.shape.dtype.is_integer and not descending and count >= _RADIX
    if count <= _INSERTION or radix:
        return sorted_along(ctx, x, axis, descending)
    return _as_aten(ctx, x, axis, count, descending, sort_order)


@lowering(aten.sort.stable)
def sort_stable(
    ctx: Context, x: Op, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Op, Op]:
    if not stable or not x.shape.rank:
        return sort(ctx, x, dim, descending)
    return sorted_along(ctx, x, ctx.axis(dim, x.shape.rank), descending)


@lowering(aten.argsort.default)
def argsort(ctx: Context, x: Op, dim: int = -1, descending: bool = False) -> Op:
    return sort(ctx, x, dim, descending)[1]


@lowering(aten.argsort.stable)
def argsort_stable(ctx: Context, x: Op, *, stable: bool = True, dim: int = -1, descending: bool = False) -> Op:
    return sort_stable(ctx, x, stable=stable, dim=dim, descending=descending)[1]


@lowering(aten.topk.default)
def topk(ctx: Context, x: Op, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Op, ...]:
    if not x.shape.rank:
        return x, ctx.scalar(0, DType.INT64)
    axis = ctx.axis(dim, x.shape.rank)
    return _as_aten(ctx, x, axis, k, largest, lambda b, ranks: topk_order(b, ranks, k, sorted))


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
    """The most frequent element (the smallest of several), and its last index."""
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
