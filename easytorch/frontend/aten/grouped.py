"""Grouped matmul, one matrix per group of rows (mixtures of experts), and the histogram that counts the groups.

Group sizes are data, but a program's sizes are static: rows are put into blocks of one group each, and the last block
of a group is padded. With blocks of ceil(S / E) rows there are at most 2 E blocks, so at most twice the necessary work
is done for any group sizes (Gale et al. 2022, MegaBlocks, with padding).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from easytorch.backends.dtypes import DType
from easytorch.backends.graph import Op
from easytorch.frontend.arrays import scatter_along, take
from easytorch.frontend.context import Context
from easytorch.frontend.errors import LoweringError
from easytorch.frontend.registry import lowering

aten = torch.ops.aten


@dataclass(frozen=True)
class RowBlocks:
    """The layout of S rows, sorted by group, in `count` blocks of `size` rows. All are int32."""

    size: int
    count: int
    group: Op  # (count,) the group of a block
    row: Op  # (count, size) the row at a place
    used: Op  # (count, size) bool: whether there is one
    place: Op  # (S,) the place of a row among count * size
    held: Op  # (S,) bool: whether the row is of any group


def _blocks(ctx: Context, ends: Op, rows: int) -> RowBlocks:
    """`ends` (E,) are the rows at which the groups end."""
    b, groups = ctx.builder, ends.shape.dimensions[0]
    kind = DType.INT32
    size = max(1, math.ceil(rows / groups))
    count = min(rows, groups + math.ceil(rows / size))

    def number(value: int) -> Op:
        return ctx.scalar(value, kind)

    def column(x: Op) -> Op:
        return ctx.reshape(x, (*x.shape.dimensions, 1))

    ends = ctx.cast(ends, kind)
    starts = b.concatenate(0, ctx.full((1,), 0, kind), b.slice(ends, (0,), (groups - 1,)))
    filled = b.div(b.add(b.sub(ends, starts), number(size - 1)), number(size))
    square = (groups, groups)
    before = b.less_or_equal(ctx.iota(square, 1, kind), ctx.iota(square, 0, kind))
    last = b.reduce_sum(b.where(before, ctx.expand(filled, square), ctx.full(square, 0, kind)), 1)
    first = b.sub(last, filled)

    def group_of(value: Op, limits: Op) -> Op:
        """How many of the limits are not greater: the group in which a value lies."""
        over = b.less_or_equal(ctx.reshape(limits, (1, groups)), column(value))
        return b.reduce_sum(ctx.cast(over, kind), 1)

    top = number(groups - 1)
    number_of_block = ctx.iota((count,), 0, kind)
    group = b.min(group_of(number_of_block, last), top)
    start = b.add(take(ctx, starts, 0, group), _times(ctx, b.sub(number_of_block, take(ctx, first, 0, group)), size))
    row = b.add(column(start), ctx.iota((1, size), 1, kind))
    used = b.less_than(row, column(take(ctx, ends, 0, group)))
    number_of_row = ctx.iota((rows,), 0, kind)
    found = group_of(number_of_row, ends)
    held = b.less_than(found, number(groups))
    found = b.min(found, top)
    place = b.add(_times(ctx, take(ctx, first, 0, found), size), b.sub(number_of_row, take(ctx, starts, 0, found)))
    return RowBlocks(size, count, group, row, used, place, held)


def _times(ctx: Context, x: Op, factor: int) -> Op:
    return ctx.builder.mul(x, ctx.scalar(factor, x.shape.dtype))


def _masked(ctx: Context, mask: Op, x: Op) -> Op:
    spread = ctx.builder.broadcast_in_dim(mask, x.shape.with_dtype(DType.BOOL), tuple(range(mask.shape.rank)))
    return ctx.builder.where(spread, x, ctx.scalar(0, x.shape.dtype))


def _in_blocks(ctx: Context, blocks: RowBlocks, x: Op) -> Op:
    """(S, D) -> (count, size, D), zero where a block has no row."""
    inside = ctx.builder.clamp(
        ctx.scalar(0, DType.INT32), blocks.row, ctx.scalar(x.shape.dimensions[0] - 1, DType.INT32)
    )
    return _masked(ctx, blocks.used, take(ctx, x, 0, inside))


def _in_rows(ctx: Context, blocks: RowBlocks, x: Op) -> Op:
    """(count, size, D) -> (S, D), zero for rows of no group."""
    flat = ctx.reshape(x, (blocks.count * blocks.size, x.shape.dimensions[2]))
    return _masked(ctx, blocks.held, take(ctx, flat, 0, blocks.place))


@lowering("transformers::grouped_mm_fallback.default")
def grouped_mm(ctx: Context, x: Op, weight: Op, offs: Op) -> Op:
    """(S, K), (E, K, N), (E,) -> (S, N): rows offs[e - 1] to before offs[e] by weight[e]; zeros for rows beyond."""
    blocks = _blocks(ctx, offs, x.shape.dimensions[0])
    product = ctx.builder.dot_general(
        _in_blocks(ctx, blocks, x), (2,), (0,), take(ctx, weight, 0, blocks.group), (1,), (0,)
    )
    return _in_rows(ctx, blocks, product)


@lowering("transformers::grouped_mm_fallback_backward.default")
def grouped_mm_backward(ctx: Context, x: Op, weight: Op, offs: Op, grad: Op) -> tuple[Op, Op]:
    """Gradients of x and of the weight."""
    b, blocks = ctx.builder, _blocks(ctx, offs, x.shape.dimensions[0])
    by_block = _in_blocks(ctx, blocks, grad)
    of_x = b.dot_general(by_block, (2,), (0,), take(ctx, weight, 0, blocks.group), (2,), (0,))
    of_blocks = b.dot_general(_in_blocks(ctx, blocks, x), (1,), (0,), by_block, (1,), (0,))
    zeros = ctx.full(weight.shape.dimensions, 0, weight.shape.dtype)
    return _in_rows(ctx, blocks, of_x), scatter_along(ctx, zeros, 0, blocks.group, of_blocks)


@lowering(aten._grouped_mm.default)
def aten_grouped_mm(
    ctx: Context,
    x: Op,
    weight: Op,
    offs: Op | None = None,
    bias: Op | None = None,
    out_dtype: torch.dtype | None = None,
) -> Op:
    """Rows with a stack of matrices; for two stacks, a batched matmul."""
    if x.shape.rank == 3 and weight.shape.rank == 3 and offs is None:
        result = ctx.builder.dot_general(x, (2,), (0,), weight, (1,), (0,))
    elif x.shape.rank == 2 and weight.shape.rank == 3 and offs is not None and bias is None:
        result = grouped_mm(ctx, x, weight, offs)
    else:
        raise LoweringError(
            f"_grouped_mm of {x.shape} and {weight.shape}: only rows (2-d) with a stack of matrices (3-d)"
        )
    return result if out_dtype is None else ctx.cast(result, out_dtype)


@lowering("easytorch::aten_grouped_matmul.default")
def native_grouped_matmul(ctx: Context, x: Op, weight: Op, group_sizes: Op, bias: Op | None, transposed: bool) -> Op:
    """x (M, K), weight (E, K, N) (transposed: (E, N, K)), group_sizes (E,), bias (E, N) -> (M, N)."""
    b, blocks = ctx.builder, _blocks(ctx, _ends(ctx, group_sizes), x.shape.dimensions[0])
    matrices = take(ctx, weight, 0, blocks.group)
    product = b.dot_general(_in_blocks(ctx, blocks, x), (2,), (0,), matrices, (2 if transposed else 1,), (0,))
    if bias is not None:
        added = ctx.reshape(take(ctx, bias, 0, blocks.group), (blocks.count, 1, bias.shape.dimensions[1]))
        product = b.add(product, ctx.expand(added, product.shape.dimensions))
    return _in_rows(ctx, blocks, product)


@lowering("easytorch::aten_grouped_weight_grad.default")
def native_grouped_weight_grad(ctx: Context, left: Op, right: Op, group_sizes: Op) -> Op:
    """left (M, A), right (M, B), group_sizes (E,) -> (E, A, B): left^T right of the rows of each group."""
    blocks = _blocks(ctx, _ends(ctx, group_sizes), left.shape.dimensions[0])
    product = ctx.builder.dot_general(
        _in_blocks(ctx, blocks, left), (1,), (0,), _in_blocks(ctx, blocks, right), (1,), (0,)
    )
    sizes = (group_sizes.shape.dimensions[0], left.shape.dimensions[1], right.shape.dimensions[1])
    return scatter_along(ctx, ctx.full(sizes, 0, left.shape.dtype), 0, blocks.group, product)


def _ends(ctx: Context, group_sizes: Op) -> Op:
    """The rows at which the groups end."""
    groups = group_sizes.shape.dimensions[0]
    sizes = ctx.cast(group_sizes, DType.INT32)
    square = (groups, groups)
    before = ctx.builder.less_or_equal(ctx.iota(square, 1, DType.INT32), ctx.iota(square, 0, DType.INT32))
    return ctx.builder.reduce_sum(
        ctx.builder.where(before, ctx.expand(sizes, square), ctx.full(square, 0, DType.INT32)), 1
    )


@lowering(aten.histc.default)
def histc(ctx: Context, x: Op, bins: int = 100, min: float = 0, max: float = 0) -> Op:
    """How many elements lie in each of `bins` equal parts from min to max, whose ends both count; the least and the
    greatest element if min and max are equal."""
    b, kind = ctx.builder, x.shape.dtype
    flat = ctx.wide(ctx.reshape(x, (-1,)))
    wide = flat.shape.dtype
    low, high = ctx.scalar(min, wide), ctx.scalar(max, wide)
    if min == max and flat.shape.size:
        low, high = b.reduce_min(flat, 0), b.reduce_max(flat, 0)
        same = b.equal(low, high)
        one = ctx.scalar(1, wide)
        low, high = b.where(same, b.sub(low, one), low), b.where(same, b.add(high, one), high)
    scaled = b.div(b.mul(b.sub(flat, low), ctx.scalar(bins, wide)), b.sub(high, low))
    place = b.min(b.convert_dtype(scaled, DType.INT32), ctx.scalar(bins - 1, DType.INT32))
    inside = b.logical_and(b.greater_or_equal(flat, low), b.less_or_equal(flat, high))
    counts = scatter_along(
        ctx,
        ctx.full((bins,), 0, DType.INT32),
        0,
        b.where(inside, place, ctx.scalar(bins, DType.INT32)),
        ctx.full(place.shape.dimensions, 1, DType.INT32),
    )
    return ctx.cast(counts, kind)
