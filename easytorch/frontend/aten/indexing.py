"""Reading and writing at indices that are data."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from easytorch.backends.dtypes import DType
from easytorch.backends.graph import Op
from easytorch.backends.shapes import Shape
from easytorch.frontend.arrays import at_least_1d, highest, lowest, move, scatter_along, take, wrapped
from easytorch.frontend.aten.distances import norm
from easytorch.frontend.aten.scans import scan
from easytorch.frontend.context import Context
from easytorch.frontend.errors import DataDependentError
from easytorch.frontend.registry import lowering

aten = torch.ops.aten


def assign_at(ctx: Context, x: Op, places: Op, updates: Op, axes: Sequence[int]) -> Op:
    """x with `updates` in place of the slices at `places`; of several for one place the last wins.

    x: any; places: (*batch, len(axes)), indices into `axes` of x; updates: (*batch, *the other axes of x). A builder's
    scatters add or compare, so the index of the last update of each place is scattered, and updates are gathered by it.
    """
    b = ctx.builder
    batch, rank, count = places.shape.dimensions[:-1], x.shape.rank, len(axes)
    total = math.prod(batch)
    if not total or not x.shape.size:
        return x
    rest = [axis for axis in range(rank) if axis not in axes]
    if total == 1:
        starts = [ctx.scalar(0, places.shape.dtype)] * rank
        flat = ctx.reshape(places, (count,))
        for number, axis in enumerate(axes):
            starts[axis] = ctx.reshape(b.slice(flat, (number,), (number + 1,)), ())
        shape = [1 if axis in axes else size for axis, size in enumerate(x.shape.dimensions)]
        return b.dynamic_update_slice(x, ctx.reshape(updates, shape), starts)
    indexed = tuple(x.shape.dimensions[axis] for axis in axes)
    numbers = ctx.reshape(b.iota(Shape(DType.INT32, (total,)), 0), batch)
    numbers = b.add(numbers, ctx.scalar(1, DType.INT32))
    everywhere = tuple(range(count))
    last = b.scatter_max(ctx.full(indexed, 0, DType.INT32), places, numbers, len(batch), (), everywhere, everywhere)
    rows = ctx.reshape(updates, (total, *(x.shape.dimensions[axis] for axis in rest)))
    chosen = take(ctx, rows, 0, b.max(b.sub(last, ctx.scalar(1, DType.INT32)), ctx.scalar(0, DType.INT32)))
    written = b.greater_than(last, ctx.scalar(0, DType.INT32))
    order = (*axes, *rest)
    chosen = ctx.transpose(chosen, np.argsort(order).tolist())
    mask = b.broadcast_in_dim(
        ctx.transpose(written, np.argsort(axes).tolist()), Shape(DType.BOOL, x.shape.dimensions), sorted(axes)
    )
    return b.where(mask, chosen, x)


def add_at(ctx: Context, x: Op, places: Op, updates: Op, axes: Sequence[int]) -> Op:
    """x with `updates` added to the slices at `places`, shaped as for `assign_at`."""
    batch, rest = places.shape.rank - 1, x.shape.rank - len(axes)
    if not updates.shape.size:
        return x
    if x.shape.dtype is DType.BOOL:
        summed = add_at(ctx, ctx.cast(x, DType.INT32), places, ctx.cast(updates, DType.INT32), axes)
        return ctx.cast(summed, DType.BOOL)
    windows = tuple(range(batch, batch + rest))
    return ctx.builder.scatter_sum(x, places, updates, batch, windows, tuple(sorted(axes)), tuple(axes))


# --- along one axis, an index for every element


def element_places(ctx: Context, index: Op, axis: int) -> Op:
    """The full index vectors of `index`, which gives the one of `axis`: (*index, rank)."""
    b = ctx.builder
    dimensions = index.shape.dimensions
    parts = [index if number == axis else b.iota(index.shape, number) for number in range(index.shape.rank)]
    return b.concatenate(len(dimensions), *(ctx.reshape(part, (*dimensions, 1)) for part in parts))


@lowering(aten.gather.default)
def gather(ctx: Context, x: Op, dim: int, index: Op, *, sparse_grad: bool = False) -> Op:
    b = ctx.builder
    x, found = at_least_1d(ctx, x), at_least_1d(ctx, index)
    rank = x.shape.rank
    if not index.shape.size:
        return ctx.full(index.shape.dimensions, 0, x.shape.dtype)
    axis = ctx.axis(dim, rank)
    places = element_places(ctx, found, axis)
    every = tuple(range(rank))
    result = b.gather(x, places, rank, (), every, every, (1,) * rank)
    return ctx.reshape(result, index.shape.dimensions)


def _element_scatter(ctx: Context, x: Op, dim: int, index: Op, updates: Op, accumulate: bool) -> Op:
    if not index.shape.size:
        return x
    whole, index, updates = (at_least_1d(ctx, part) for part in (x, index, updates))
    if updates.shape.dimensions != index.shape.dimensions:
        updates = ctx.builder.slice(updates, (0,) * updates.shape.rank, index.shape.dimensions)
    places = element_places(ctx, index, ctx.axis(dim, whole.shape.rank))
    write = add_at if accumulate else assign_at
    return ctx.reshape(write(ctx, whole, places, updates, range(whole.shape.rank)), x.shape.dimensions)


@lowering(aten.scatter.src)
def scatter(ctx: Context, x: Op, dim: int, index: Op, src: Op) -> Op:
    return _element_scatter(ctx, x, dim, index, src, accumulate=False)


@lowering(aten.scatter.value)
def scatter_value(ctx: Context, x: Op, dim: int, index: Op, value: complex) -> Op:
    return scatter(ctx, x, dim, index, ctx.full(index.shape.dimensions, value, x.shape.dtype))


@lowering(aten.scatter_add.default)
def scatter_add(ctx: Context, x: Op, dim: int, index: Op, src: Op) -> Op:
    return _element_scatter(ctx, x, dim, index, src, accumulate=True)


@lowering(aten.scatter.reduce, aten.scatter.value_reduce)
def scatter_by(ctx: Context, x: Op, dim: int, index: Op, src: Op | complex, *, reduce: str) -> Op:
    updates = src if isinstance(src, Op) else ctx.full(index.shape.dimensions, src, x.shape.dtype)
    if reduce == "add":
        return scatter_add(ctx, x, dim, index, updates)
    return scatter_reduce(ctx, x, dim, index, updates, "prod")


@lowering(aten.scatter_reduce.two)
def scatter_reduce(ctx: Context, x: Op, dim: int, index: Op, src: Op, reduce: str, *, include_self: bool = True) -> Op:
    b, dtype = ctx.builder, x.shape.dtype
    if not index.shape.size:
        return x
    whole, index, src = (at_least_1d(ctx, part) for part in (x, index, src))
    rank, axis = whole.shape.rank, ctx.axis(dim, whole.shape.rank)
    updates = b.slice(src, (0,) * rank, index.shape.dimensions)
    if reduce == "prod":
        return ctx.reshape(_scattered_product(ctx, whole, axis, index, updates, include_self), x.shape.dimensions)
    places, every = element_places(ctx, index, axis), tuple(range(rank))
    neutral = {"amax": lowest, "amin": highest}.get(reduce, lambda _: 0)(dtype)
    counts = b.scatter_sum(
        ctx.full(whole.shape.dimensions, 0, DType.INT32),
        places,
        ctx.full(index.shape.dimensions, 1, DType.INT32),
        rank,
        (),
        every,
        every,
    )
    start = whole
    if not include_self:
        start = b.where(b.greater_than(counts, ctx.scalar(0, DType.INT32)), ctx.scalar(neutral, dtype), whole)
    if reduce in ("amax", "amin"):
        write = b.scatter_max if reduce == "amax" else b.scatter_min
        result = write(start, places, updates, rank, (), every, every)
    else:
        result = add_at(ctx, start, places, updates, every)
    if reduce == "mean":
        one = ctx.scalar(1, DType.INT32)
        number = b.add(counts, one) if include_self else b.max(counts, one)
        result = _mean(ctx, result, ctx.cast(number, dtype))
    return ctx.reshape(result, x.shape.dimensions)


def _mean(ctx: Context, total: Op, count: Op) -> Op:
    """total / count; of integers rounded down."""
    b = ctx.builder
    quotient = b.div(total, count)
    if not total.shape.dtype.is_integer:
        return quotient
    below = b.less_than(total, b.mul(quotient, count))
    return b.where(below, b.sub(quotient, ctx.scalar(1, total.shape.dtype)), quotient)


def _scattered_product(ctx: Context, x: Op, axis: int, index: Op, updates: Op, include_self: bool) -> Op:
    """There is no multiplying scatter: every place takes the product of its updates, found by comparison."""
    b, rank = ctx.builder, x.shape.rank
    block = list(index.shape.dimensions)
    length, block[axis] = block[axis], x.shape.dimensions[axis]
    # (*block, length): which updates name which place.
    cube = (*block, length)
    lines = move(ctx, updates, (axis,), (rank - 1,))
    named = move(ctx, index, (axis,), (rank - 1,))
    others = [number for number in range(rank) if number != axis]
    values = b.broadcast_in_dim(lines, Shape(lines.shape.dtype, cube), (*others, rank))
    named = b.broadcast_in_dim(named, Shape(named.shape.dtype, cube), (*others, rank))
    hits = b.equal(named, ctx.iota(cube, axis, named.shape.dtype))
    product = b.reduce_product(b.where(hits, values, ctx.scalar(1, x.shape.dtype)), rank)
    old = b.slice(x, (0,) * rank, block)
    new = b.mul(old, product) if include_self else b.where(b.reduce_logical_or(hits, rank), product, old)
    return b.dynamic_update_slice(x, new, [ctx.scalar(0, DType.INT32)] * rank)


# --- whole slices along one axis


@lowering(aten.index_select.default)
def index_select(ctx: Context, x: Op, dim: int, index: Op) -> Op:
    if not x.shape.rank:
        return x
    return take(ctx, x, ctx.axis(dim, x.shape.rank), at_least_1d(ctx, index))


def _index_write(ctx: Context, x: Op, dim: int, index: Op, source: Op, accumulate: bool) -> Op:
    whole, index, source = (at_least_1d(ctx, part) for part in (x, index, source))
    axis = ctx.axis(dim, whole.shape.rank)
    places = ctx.reshape(index, (*index.shape.dimensions, 1))
    updates = move(ctx, source, (axis,), (0,))
    write = add_at if accumulate else assign_at
    return ctx.reshape(write(ctx, whole, places, updates, (axis,)), x.shape.dimensions)


@lowering(aten.index_add.default)
def index_add(ctx: Context, x: Op, dim: int, index: Op, source: Op, *, alpha: complex = 1) -> Op:
    if alpha != 1:
        source = ctx.builder.mul(source, ctx.scalar(alpha, source.shape.dtype))
    return _index_write(ctx, x, dim, index, source, accumulate=True)


@lowering(aten.index_copy.default)
def index_copy(ctx: Context, x: Op, dim: int, index: Op, source: Op) -> Op:
    return _index_write(ctx, x, dim, index, source, accumulate=False)


@lowering(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(ctx: Context, x: Op, dim: int, index: Op, value: Op | complex) -> Op:
    dimensions = list(at_least_1d(ctx, x).shape.dimensions)
    dimensions[ctx.axis(dim, x.shape.rank)] = index.shape.size
    return index_copy(ctx, x, dim, index, ctx.full(dimensions, value, x.shape.dtype))


@lowering(aten.index_reduce.default)
def index_reduce(ctx: Context, x: Op, dim: int, index: Op, source: Op, reduce: str, *, include_self: bool = True) -> Op:
    whole, source = at_least_1d(ctx, x), at_least_1d(ctx, source)
    axis = ctx.axis(dim, whole.shape.rank)
    index = ctx.builder.broadcast_in_dim(
        at_least_1d(ctx, index), Shape(index.shape.dtype, source.shape.dimensions), (axis,)
    )
    result = scatter_reduce(ctx, whole, axis, index, source, reduce, include_self=include_self)
    return ctx.reshape(result, x.shape.dimensions)


@lowering(aten.take.default)
def take_flat(ctx: Context, x: Op, index: Op) -> Op:
    return take(ctx, ctx.reshape(x, (x.shape.size,)), 0, wrapped(ctx, index, x.shape.size))


@lowering(aten.put.default)
def put(ctx: Context, x: Op, index: Op, source: Op, accumulate: bool = False) -> Op:
    flat = ctx.reshape(x, (x.shape.size,))
    places = ctx.reshape(wrapped(ctx, index, x.shape.size), (index.shape.size, 1))
    updates = ctx.reshape(source, (index.shape.size,))
    write = add_at if accumulate else assign_at
    return ctx.reshape(write(ctx, flat, places, updates, (0,)), x.shape.dimensions)


# --- several index tensors at once


def _index_vectors(ctx: Context, x: Op, indices: Sequence[Op | None]) -> tuple[Op, tuple[int, ...]]:
    """(*broadcast, number of them): the index vectors, and the axes of x they are for."""
    b = ctx.builder
    axes = tuple(axis for axis, index in enumerate(indices) if index is not None)
    given = [index for index in indices if index is not None]
    if any(index.shape.dtype is DType.BOOL for index in given):
        raise DataDependentError(
            f"{'an operation' if ctx.node is None else ctx.node.target}: how many elements a mask selects depends on "
            "the data, and a compiled program has its sizes fixed; use torch.where, or masked_fill"
        )
    kind = DType.INT64 if any(index.shape.dtype is DType.INT64 for index in given) else DType.INT32
    dimensions = ctx.broadcast_dims(*(index.shape.dimensions for index in given))
    columns = [
        ctx.expand(wrapped(ctx, ctx.cast(index, kind), x.shape.dimensions[axis]), dimensions)
        for axis, index in zip(axes, given, strict=True)
    ]
    vectors = b.concatenate(len(dimensions), *(ctx.reshape(part, (*dimensions, 1)) for part in columns))
    return vectors, axes


def _first_place(axes: Sequence[int]) -> int:
    """The position of the index dimensions in the result: the first of `axes` if these are adjacent, else 0."""
    together = axes[-1] - axes[0] == len(axes) - 1
    return axes[0] if together else 0


@lowering(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(ctx: Context, x: Op, indices: Sequence[Op | None]) -> Op:
    if all(index is None for index in indices):
        return x
    vectors, axes = _index_vectors(ctx, x, indices)
    batch, rest = vectors.shape.rank - 1, x.shape.rank - len(axes)
    start = _first_place(axes)
    offsets = [*range(start), *range(start + batch, batch + rest)]
    sizes = [1 if axis in axes else size for axis, size in enumerate(x.shape.dimensions)]
    kept = [x.shape.dimensions[axis] for axis in range(x.shape.rank) if axis not in axes]
    shape = [*kept[:start], *vectors.shape.dimensions[:-1], *kept[start:]]
    if 0 in shape:
        return ctx.full(shape, 0, x.shape.dtype)
    return ctx.builder.gather(x, vectors, batch, offsets, axes, axes, sizes)


@lowering(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(ctx: Context, x: Op, indices: Sequence[Op | None], values: Op, accumulate: bool = False) -> Op:
    """A bool mask is counted through: the n-th place it names takes the n-th of the values, or the only one."""
    given = [index for index in indices if index is not None]
    if not given:
        new = ctx.expand(values, x.shape.dimensions)
        return ctx.builder.add(x, new) if accumulate else new
    if len(given) == 1 and given[0].shape.dtype is DType.BOOL:
        axis = next(axis for axis, index in enumerate(indices) if index is not None)
        return _put_by_mask(ctx, x, axis, given[0], values, accumulate)
    vectors, axes = _index_vectors(ctx, x, indices)
    batch = vectors.shape.dimensions[:-1]
    kept = [x.shape.dimensions[axis] for axis in range(x.shape.rank) if axis not in axes]
    start = _first_place(axes)
    updates = ctx.expand(values, (*kept[:start], *batch, *kept[start:]))
    updates = move(ctx, updates, range(start, start + len(batch)), range(len(batch)))
    write = add_at if accumulate else assign_at
    return write(ctx, x, vectors, updates, axes)


# --- masks


def _put_by_mask(ctx: Context, x: Op, axis: int, mask: Op, values: Op, accumulate: bool) -> Op:
    """values: broadcastable to (*before, n, *after), n the places that the mask over the axes from `axis` on names."""
    b, before = ctx.builder, x.shape.dimensions[:axis]
    after = x.shape.dimensions[axis + mask.shape.rank :]
    rank = axis + 1 + len(after)
    values = ctx.reshape(values, (*(1,) * (rank - values.shape.rank), *values.shape.dimensions))
    count = values.shape.dimensions[axis]
    if not count or not x.shape.size:
        return x
    rows = ctx.expand(values, (*before, count, *after))
    new = take(ctx, rows, axis, b.min(_numbered(ctx, mask), ctx.scalar(count - 1, DType.INT32)))
    everywhere = Shape(DType.BOOL, x.shape.dimensions)
    named = b.broadcast_in_dim(mask, everywhere, range(axis, axis + mask.shape.rank))
    return b.where(named, b.add(x, new) if accumulate else new, x)


def _numbered(ctx: Context, mask: Op) -> Op:
    """int32: the number of true elements before each true one; 0 or more elsewhere."""
    b = ctx.builder
    flat = ctx.cast(ctx.reshape(mask, (mask.shape.size,)), DType.INT32)
    (count,) = scan(ctx, [flat], 0, [0], lambda earlier, later: [b.add(earlier, later)])
    before = b.max(b.sub(count, ctx.scalar(1, DType.INT32)), ctx.scalar(0, DType.INT32))
    return ctx.reshape(before, mask.shape.dimensions)


@lowering(aten.masked_scatter.default)
def masked_scatter(ctx: Context, x: Op, mask: Op, source: Op) -> Op:
    """The elements of `source` in turn where the mask holds."""
    b = ctx.builder
    dimensions = ctx.broadcast_dims(x.shape.dimensions, mask.shape.dimensions)
    x, mask = ctx.expand(x, dimensions), ctx.expand(mask, dimensions)
    if not x.shape.size or not source.shape.size:
        return x
    nth = b.min(_numbered(ctx, mask), ctx.scalar(source.shape.size - 1, DType.INT32))
    return b.where(mask, take(ctx, ctx.reshape(source, (source.shape.size,)), 0, nth), x)


@lowering(aten.nonzero.default, aten.masked_select.default)
def nonzero(ctx: Context, x: Op, mask: Op | None = None) -> Op:
    raise DataDependentError(
        "nonzero and masked_select: how many elements there are depends on the data, and a compiled program has its "
        "sizes fixed; use torch.where, or torch.nonzero_static with a size"
    )


@lowering(aten.repeat_interleave.Tensor)
def repeat_interleave(ctx: Context, repeats: Op, *, output_size: int | None = None) -> Op:
    """Each index as often as `repeats` (n,) says."""
    if not isinstance(output_size, int):
        raise DataDependentError(
            "repeat_interleave: how long the result is depends on the data, and a compiled program has its sizes "
            "fixed; give output_size"
        )
    b, (length,) = ctx.builder, repeats.shape.dimensions
    if not length or not output_size:
        return ctx.full((output_size,), 0, repeats.shape.dtype)
    (ends,) = scan(ctx, [repeats], 0, [0], lambda earlier, later: [b.add(earlier, later)])
    square = Shape(repeats.shape.dtype, (output_size, length))
    passed = b.greater_or_equal(b.iota(square, 0), b.broadcast_in_dim(ends, square, (1,)))
    return b.reduce_sum(ctx.cast(passed, repeats.shape.dtype), 1)


@lowering(aten.nonzero_static.default)
def nonzero_static(ctx: Context, x: Op, *, size: int, fill_value: int = -1) -> Op:
    """The first `size` index vectors of elements that are not zero, then `fill_value`."""
    b, rank, total = ctx.builder, x.shape.rank, x.shape.size
    if not size or not total or not rank:
        return ctx.full((size, rank), fill_value, DType.INT64)
    hit = b.not_equal(ctx.reshape(x, (total,)), ctx.scalar(0, x.shape.dtype))
    (count,) = scan(ctx, [ctx.cast(hit, DType.INT32)], 0, [0], lambda earlier, later: [b.add(earlier, later)])
    # False elements, and those beyond `size`, get an out-of-bounds place, which drops them.
    place = b.where(hit, b.sub(count, ctx.scalar(1, DType.INT32)), ctx.scalar(size, DType.INT32))
    flat = b.scatter_max(
        ctx.full((size,), -1, DType.INT64),
        ctx.reshape(place, (total, 1)),
        ctx.iota((total,), 0, DType.INT64),
        1,
        (),
        (0,),
        (0,),
    )
    columns = []
    stride = total
    for length in x.shape.dimensions:
        stride //= length
        part = b.rem(b.div(flat, ctx.scalar(stride, DType.INT64)), ctx.scalar(length, DType.INT64))
        part = b.where(b.less_than(flat, ctx.scalar(0, DType.INT64)), ctx.scalar(fill_value, DType.INT64), part)
        columns.append(ctx.reshape(part, (size, 1)))
    return b.concatenate(1, *columns)


# --- tables


@lowering(aten.embedding_renorm.default)
def embedding_renorm(ctx: Context, weight: Op, indices: Op, max_norm: float, norm_type: float) -> Op:
    """The rows that `indices` name, brought down to `max_norm` where their norm is greater."""
    b, kind, (count, _) = ctx.builder, weight.shape.dtype, weight.shape.dimensions
    norms = norm(ctx, b.abs(weight), norm_type)
    scales = b.div(ctx.scalar(max_norm, kind), b.add(norms, ctx.scalar(1e-7, kind)))
    flat = ctx.reshape(indices, (indices.shape.size,))
    ones = ctx.full((indices.shape.size,), 1, DType.INT32)
    named = scatter_along(ctx, ctx.full((count,), 0, DType.INT32), 0, flat, ones)
    shrunk = b.logical_and(
        b.greater_than(named, ctx.scalar(0, DType.INT32)), b.greater_than(norms, ctx.scalar(max_norm, kind))
    )
    factors = b.where(shrunk, scales, ctx.scalar(1, kind))
    return b.mul(weight, b.broadcast_in_dim(factors, weight.shape, (0,)))


@lowering(aten.embedding_dense_backward.default)
def embedding_dense_backward(
    ctx: Context, grad_output: Op, indices: Op, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Op:
    b = ctx.builder
    total, width = indices.shape.size, grad_output.shape.dimensions[-1]
    flat = ctx.reshape(indices, (total,))
    rows = ctx.wide(ctx.reshape(grad_output, (total, width)))
    kind = rows.shape.dtype
    if scale_grad_by_freq:
        counts = scatter_along(ctx, ctx.full((num_weights,), 0, kind), 0, flat, ctx.full((total,), 1, kind))
        often = take(ctx, counts, 0, flat)
        rows = b.div(rows, b.broadcast_in_dim(often, rows.shape, (0,)))
    if padding_idx >= 0:
        # Outside, where it is left out.
        padding = b.equal(flat, ctx.scalar(padding_idx, flat.shape.dtype))
        flat = b.where(padding, ctx.scalar(num_weights, flat.shape.dtype), flat)
    result = scatter_along(ctx, ctx.full((num_weights, width), 0, kind), 0, flat, rows)
    return ctx.cast(result, grad_output.shape.dtype)
