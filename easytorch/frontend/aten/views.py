"""Views, slices and concatenation. A functional graph has no views: each operation gives a new array."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from easytorch.backends.dtypes import DType, dtype_of
from easytorch.backends.graph import Op
from easytorch.backends.types import PadAxis
from easytorch.frontend.context import Context
from easytorch.frontend.errors import LoweringError
from easytorch.frontend.registry import lowering

aten = torch.ops.aten
Ints = Sequence[int]


@lowering(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten._reshape_alias.default)
def view(ctx: Context, x: Op, size: Ints, stride: Ints | None = None) -> Op:
    return ctx.reshape(x, size)


@lowering(aten.view.dtype)
def view_dtype(ctx: Context, x: Op, dtype: torch.dtype) -> Op:
    """The last axis grows or shrinks; the builder adds or takes up an axis."""
    b, here, there = ctx.builder, x.shape.dtype, dtype_of(dtype)
    dims = x.shape.dimensions
    if DType.BOOL in (here, there) and here is not there:
        raise LoweringError("view: the bits of bool cannot be read as another type")
    if here.size == there.size:
        return b.bitcast(x, there)
    if here.size > there.size:
        wide = b.bitcast(x, there)
        return b.reshape(wide, (*dims[:-1], dims[-1] * (here.size // there.size)))
    count = there.size // here.size
    return b.bitcast(b.reshape(x, (*dims[:-1], dims[-1] // count, count)), there)


@lowering(aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default, aten.lift.default)
@lowering(aten.clone.default, aten.contiguous.default)
def alias(ctx: Context, x: Op, memory_format: Any = None) -> Op:
    return x


@lowering(aten._to_copy.default)
def to_copy(ctx: Context, x: Op, dtype: torch.dtype | None = None, **where: Any) -> Op:
    """The target device is ignored: the computation has one device."""
    return x if dtype is None else ctx.cast(x, dtype)


@lowering(aten.copy.default)
def copy(ctx: Context, x: Op, source: Op, non_blocking: bool = False) -> Op:
    return ctx.expand(ctx.cast(source, x.shape.dtype), x.shape.dimensions)


@lowering(aten.permute.default)
def permute(ctx: Context, x: Op, dims: Ints) -> Op:
    return ctx.transpose(x, [ctx.axis(axis, x.shape.rank) for axis in dims])


@lowering(aten.transpose.int)
def transpose(ctx: Context, x: Op, dim0: int, dim1: int) -> Op:
    order = list(range(x.shape.rank))
    if order:
        first, second = ctx.axis(dim0, len(order)), ctx.axis(dim1, len(order))
        order[first], order[second] = second, first
    return ctx.transpose(x, order)


@lowering(aten.t.default)
def t(ctx: Context, x: Op) -> Op:
    return ctx.transpose(x, range(x.shape.rank)[::-1])


@lowering(aten.unsqueeze.default)
def unsqueeze(ctx: Context, x: Op, dim: int) -> Op:
    dims = list(x.shape.dimensions)
    dims.insert(ctx.axis(dim, len(dims) + 1), 1)
    return ctx.reshape(x, dims)


@lowering(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def squeeze(ctx: Context, x: Op, dim: int | Ints | None = None) -> Op:
    rank = x.shape.rank
    given = range(rank) if dim is None else (dim,) if isinstance(dim, int) else dim
    over = {ctx.axis(axis, rank) for axis in given}
    return ctx.reshape(x, [size for axis, size in enumerate(x.shape.dimensions) if size != 1 or axis not in over])


@lowering(aten.expand.default)
def expand(ctx: Context, x: Op, size: Ints, implicit: bool = False) -> Op:
    """-1 keeps an axis as it is."""
    first = len(size) - x.shape.rank
    dims = [x.shape.dimensions[axis - first] if length == -1 else length for axis, length in enumerate(size)]
    return ctx.expand(x, dims)


@lowering(aten.repeat.default)
def repeat(ctx: Context, x: Op, repeats: Ints) -> Op:
    dims = (1,) * (len(repeats) - x.shape.rank) + x.shape.dimensions
    between = ctx.reshape(x, [part for size in dims for part in (1, size)])
    spread = ctx.expand(between, [part for count, size in zip(repeats, dims, strict=True) for part in (count, size)])
    return ctx.reshape(spread, [count * size for count, size in zip(repeats, dims, strict=True)])


@lowering(aten.cat.default)
def cat(ctx: Context, tensors: Sequence[Op], dim: int = 0) -> Op:
    """An empty vector is compatible with any shape, as torch allows for backward compatibility."""
    kind = ctx.promote(*tensors)
    real = [x for x in tensors if x.shape.dimensions != (0,)] or list(tensors[:1])
    if len(real) == 1:
        return ctx.cast(real[0], kind)
    return ctx.builder.concatenate(ctx.axis(dim, real[0].shape.rank), *(ctx.cast(x, kind) for x in real))


@lowering(aten.stack.default)
def stack(ctx: Context, tensors: Sequence[Op], dim: int = 0) -> Op:
    axis = ctx.axis(dim, tensors[0].shape.rank + 1)
    return cat(ctx, [unsqueeze(ctx, x, axis) for x in tensors], axis)


def narrow(ctx: Context, x: Op, axis: int, start: int, stop: int, step: int = 1) -> Op:
    """Elements `start` to before `stop` along `axis`, all inside."""
    dims = x.shape.dimensions
    if (start, stop, step) == (0, dims[axis], 1):
        return x
    starts, limits, strides = [0] * len(dims), list(dims), [1] * len(dims)
    starts[axis], limits[axis], strides[axis] = start, max(start, stop), step
    return ctx.builder.slice(x, starts, limits, strides)


def bounds(start: int | None, end: int | None, size: int) -> tuple[int, int]:
    """A slice's bounds, negative ones counted from the end, put inside."""
    first, last, _ = slice(start, end).indices(size)
    return first, max(first, last)


@lowering(aten.slice.Tensor)
def slice_tensor(
    ctx: Context, x: Op, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Op:
    axis = ctx.axis(dim, x.shape.rank)
    first, last = bounds(start, end, x.shape.dimensions[axis])
    return narrow(ctx, x, axis, first, last, step)


@lowering(aten.narrow.default)
def narrow_default(ctx: Context, x: Op, dim: int, start: int, length: int) -> Op:
    axis = ctx.axis(dim, x.shape.rank)
    first = start % x.shape.dimensions[axis] if start < 0 else start
    return narrow(ctx, x, axis, first, first + length)


@lowering(aten.select.int)
def select(ctx: Context, x: Op, dim: int, index: int | Op) -> Op:
    axis = ctx.axis(dim, x.shape.rank)
    dims = x.shape.dimensions
    rest = dims[:axis] + dims[axis + 1 :]
    if isinstance(index, Op):
        zero = ctx.scalar(0, index.shape.dtype)
        below = ctx.builder.less_than(index, zero)
        index = ctx.builder.where(below, ctx.builder.add(index, ctx.scalar(dims[axis], index.shape.dtype)), index)
        starts = [index if place == axis else zero for place in range(len(dims))]
        sizes = [1 if place == axis else size for place, size in enumerate(dims)]
        return ctx.reshape(ctx.builder.dynamic_slice(x, starts, sizes), rest)
    if not -dims[axis] <= index < dims[axis]:
        raise LoweringError(f"select: index {index} is outside of an axis of {dims[axis]}")
    first = index % dims[axis]
    return ctx.reshape(narrow(ctx, x, axis, first, first + 1), rest)


def splice(ctx: Context, x: Op, source: Op, axis: int, start: int, step: int = 1) -> Op:
    """x with `source` in place of its elements from `start` along `axis`, every `step`-th."""
    b, size, count = ctx.builder, x.shape.dimensions[axis], source.shape.dimensions[axis]
    if not count:
        return x
    if step == 1:
        before = narrow(ctx, x, axis, 0, start) if start else None
        after = narrow(ctx, x, axis, start + count, size) if start + count < size else None
        parts = [part for part in (before, source, after) if part is not None]
        return parts[0] if len(parts) == 1 else b.concatenate(axis, *parts)
    covered = start + (count - 1) * step + 1
    pads = [PadAxis()] * x.shape.rank
    pads[axis] = PadAxis(start, size - covered, step - 1)
    spread = b.pad(source, ctx.scalar(0, x.shape.dtype), *pads)
    counted = ctx.iota(x.shape.dimensions, axis, DType.INT64)
    offset = b.sub(counted, ctx.scalar(start, DType.INT64))
    on_step = b.equal(b.rem(offset, ctx.scalar(step, DType.INT64)), ctx.scalar(0, DType.INT64))
    inside = b.logical_and(
        b.greater_or_equal(offset, ctx.scalar(0, DType.INT64)), b.less_than(counted, ctx.scalar(covered, DType.INT64))
    )
    return b.where(b.logical_and(on_step, inside), spread, x)


@lowering(aten.slice_scatter.default)
def slice_scatter(
    ctx: Context, x: Op, src: Op, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Op:
    axis = ctx.axis(dim, x.shape.rank)
    first, last = bounds(start, end, x.shape.dimensions[axis])
    dims = list(x.shape.dimensions)
    dims[axis] = len(range(first, last, step))
    return splice(ctx, x, ctx.expand(ctx.cast(src, x.shape.dtype), dims), axis, first, step)


@lowering(aten.select_scatter.default)
def select_scatter(ctx: Context, x: Op, src: Op, dim: int, index: int) -> Op:
    axis = ctx.axis(dim, x.shape.rank)
    first = index % x.shape.dimensions[axis]
    dims = list(x.shape.dimensions)
    del dims[axis]
    source = unsqueeze(ctx, ctx.expand(ctx.cast(src, x.shape.dtype), dims), axis)
    return splice(ctx, x, source, axis, first)


@lowering(aten.split_with_sizes.default, aten.split.sizes)
def split_with_sizes(ctx: Context, x: Op, split_sizes: Ints, dim: int = 0) -> list[Op]:
    axis = ctx.axis(dim, x.shape.rank)
    parts, start = [], 0
    for size in split_sizes:
        parts.append(narrow(ctx, x, axis, start, start + size))
        start += size
    return parts


@lowering(aten.split.Tensor)
def split(ctx: Context, x: Op, split_size: int, dim: int = 0) -> list[Op]:
    length = x.shape.dimensions[ctx.axis(dim, x.shape.rank)]
    if not length or not split_size:
        return [x]
    return split_with_sizes(ctx, x, [min(split_size, length - at) for at in range(0, length, split_size)], dim)


@lowering(aten.chunk.default)
def chunk(ctx: Context, x: Op, chunks: int, dim: int = 0) -> list[Op]:
    length = x.shape.dimensions[ctx.axis(dim, x.shape.rank)]
    if not length:
        return [x] * chunks
    return split(ctx, x, math.ceil(length / chunks), dim)


@lowering(aten.unbind.int)
def unbind(ctx: Context, x: Op, dim: int = 0) -> list[Op]:
    return [select(ctx, x, dim, index) for index in range(x.shape.dimensions[ctx.axis(dim, x.shape.rank)])]


@lowering(aten.flatten.using_ints)
def flatten(ctx: Context, x: Op, start_dim: int = 0, end_dim: int = -1) -> Op:
    if not x.shape.rank:
        return ctx.reshape(x, (1,))
    first, last = ctx.axis(start_dim, x.shape.rank), ctx.axis(end_dim, x.shape.rank)
    dims = x.shape.dimensions
    return ctx.reshape(x, (*dims[:first], math.prod(dims[first : last + 1]), *dims[last + 1 :]))


@lowering(aten.unflatten.int)
def unflatten(ctx: Context, x: Op, dim: int, sizes: Ints) -> Op:
    axis, dims = ctx.axis(dim, x.shape.rank), x.shape.dimensions
    known = math.prod(size for size in sizes if size != -1)
    parts = [dims[axis] // known if size == -1 else size for size in sizes]
    return ctx.reshape(x, (*dims[:axis], *parts, *dims[axis + 1 :]))


@lowering(aten.flip.default)
def flip(ctx: Context, x: Op, dims: Ints) -> Op:
    over = [ctx.axis(axis, x.shape.rank) for axis in dims] if x.shape.rank else []
    return ctx.builder.reverse(x, over) if over else x


@lowering(aten.constant_pad_nd.default)
def constant_pad_nd(ctx: Context, x: Op, pad: Ints, value: float = 0) -> Op:
    """`pad` names the last axis first; negative padding cuts off."""
    config = [PadAxis()] * x.shape.rank
    for place in range(len(pad) // 2):
        config[x.shape.rank - 1 - place] = PadAxis(pad[2 * place], pad[2 * place + 1])
    return ctx.builder.pad(x, ctx.scalar(value, x.shape.dtype), *config)


@lowering(aten.diagonal.default)
def diagonal(ctx: Context, x: Op, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Op:
    """The two axes become one, the last: every (columns + 1)-th element of them flattened."""
    order, start, count = _diagonal(ctx, x, offset, dim1, dim2)
    *batch, rows, columns = ctx.transpose(x, order).shape.dimensions
    if not count:
        return ctx.full((*batch, 0), 0, x.shape.dtype)
    flat = ctx.reshape(ctx.transpose(x, order), (*batch, rows * columns))
    return narrow(ctx, flat, len(batch), start, start + (count - 1) * (columns + 1) + 1, columns + 1)


@lowering(aten.diagonal_scatter.default)
def diagonal_scatter(ctx: Context, x: Op, src: Op, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Op:
    """x with `src` in place of its diagonal."""
    order, start, count = _diagonal(ctx, x, offset, dim1, dim2)
    moved = ctx.transpose(x, order)
    *batch, rows, columns = moved.shape.dimensions
    flat = ctx.reshape(moved, (*batch, rows * columns))
    source = ctx.expand(ctx.cast(src, x.shape.dtype), (*batch, count))
    written = ctx.reshape(splice(ctx, flat, source, len(batch), start, columns + 1), moved.shape.dimensions)
    return ctx.transpose(written, [order.index(axis) for axis in range(len(order))])


def _diagonal(ctx: Context, x: Op, offset: int, dim1: int, dim2: int) -> tuple[list[int], int, int]:
    """A permutation that puts dim1 and dim2 last, and the diagonal's offset and length in those two, flattened."""
    first, second = ctx.axis(dim1, x.shape.rank), ctx.axis(dim2, x.shape.rank)
    order = [*(axis for axis in range(x.shape.rank) if axis not in (first, second)), first, second]
    rows, columns = x.shape.dimensions[first], x.shape.dimensions[second]
    count = max(0, min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns))
    return order, offset if offset >= 0 else -offset * columns, count
