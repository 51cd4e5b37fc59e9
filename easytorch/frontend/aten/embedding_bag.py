"""Rows of a table, reduced by bag (`embedding_bag`)."""

from __future__ import annotations

import torch

from easytorch.backends.dtypes import DType, dtype_of
from easytorch.backends.graph import Op
from easytorch.backends.shapes import Shape
from easytorch.backends.types import PadAxis
from easytorch.frontend.arrays import pad, scatter_along, take
from easytorch.frontend.context import Context
from easytorch.frontend.registry import lowering

aten = torch.ops.aten
_SUM, _MEAN, _MAX = range(3)


@lowering(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(
    ctx: Context,
    weight: Op,
    indices: Op,
    offsets: Op,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: Op | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Op, Op, Op, Op]:
    """weight (V, D), indices (n,), offsets (bags,): (bags, D), an empty bag is zero. Then, if the graph has
    room for them, as in ATen: the bag of each index, the sizes of bags, and for a maximum the row indices."""
    b, kind = ctx.builder, indices.shape.dtype
    count = offsets.shape.size - int(include_last_offset)
    (total,), (_, width) = indices.shape.dimensions, weight.shape.dimensions
    offsets = ctx.cast(b.slice(offsets, (0,), (count,)), kind)
    square = Shape(kind, (total, count))
    begun = b.less_or_equal(b.broadcast_in_dim(offsets, square, (1,)), b.iota(square, 0))
    bags = b.sub(_count(ctx, begun, kind), ctx.scalar(1, kind))
    # Outside, where they are left out.
    padding = b.equal(indices, ctx.scalar(padding_idx, kind))
    targets = b.where(padding, ctx.scalar(count, kind), bags)
    sizes = scatter_along(ctx, ctx.full((count,), 0, kind), 0, targets, ctx.full((total,), 1, kind))
    rows = ctx.wide(take(ctx, weight, 0, indices))
    if per_sample_weights is not None:
        rows = b.mul(rows, b.broadcast_in_dim(ctx.cast(per_sample_weights, rows.shape.dtype), rows.shape, (0,)))
    wide = rows.shape.dtype
    chosen = None
    if mode == _MAX:
        result, chosen = _greatest(ctx, rows, targets, bags, sizes, indices)
    else:
        result = scatter_along(ctx, ctx.full((count, width), 0, wide), 0, targets, rows)
    if mode == _MEAN:
        divisor = ctx.cast(b.max(sizes, ctx.scalar(1, kind)), wide)
        result = b.div(result, b.broadcast_in_dim(divisor, result.shape, (0,)))
    # ATen counts no sizes for a sum.
    counted = ctx.full((count,), 0, kind) if mode == _SUM else sizes
    further = _described(ctx, bags, counted, counted if chosen is None else chosen)
    return ctx.cast(result, weight.shape.dtype), further[0], further[1], further[2]


def _count(ctx: Context, truths: Op, kind: DType) -> Op:
    """The number of true elements along the last axis."""
    return ctx.builder.reduce_sum(ctx.cast(truths, kind), truths.shape.rank - 1)


def _greatest(ctx: Context, rows: Op, targets: Op, bags: Op, sizes: Op, indices: Op) -> tuple[Op, Op]:
    """(bags, D): the greatest of each bag, zero of an empty one, and the index it is from."""
    b, kind = ctx.builder, indices.shape.dtype
    count, total = sizes.shape.size, indices.shape.size
    place = ctx.reshape(targets, (total, 1))
    dimensions = (count, rows.shape.dimensions[1])
    found = b.scatter_max(ctx.full(dimensions, float("-inf"), rows.shape.dtype), place, rows, 1, (1,), (0,), (0,))
    from_bag = take(ctx, found, 0, bags)
    number = b.where(b.equal(rows, from_bag), b.iota(rows.shape.with_dtype(kind), 0), ctx.scalar(total, kind))
    first = b.scatter_min(ctx.full(dimensions, total, kind), place, number, 1, (1,), (0,), (0,))
    chosen = take(ctx, indices, 0, b.min(first, ctx.scalar(total - 1, kind)))
    empty = b.broadcast_in_dim(b.equal(sizes, ctx.scalar(0, kind)), found.shape.with_dtype(DType.BOOL), (0,))
    zero = ctx.scalar(0, rows.shape.dtype)
    return b.where(empty, zero, found), b.where(empty, ctx.scalar(0, kind), chosen)


def _described(ctx: Context, bags: Op, sizes: Op, chosen: Op) -> list[Op]:
    """Zeros of the shapes in the graph where those leave the bags out: sums on a CPU do not compute them."""
    values = [bags, sizes, chosen]
    if ctx.node is None:
        return values
    described = ctx.node.meta["val"][1:]
    if described[0].shape != torch.Size(bags.shape.dimensions):
        return [ctx.full([int(size) for size in tensor.shape], 0, dtype_of(tensor.dtype)) for tensor in described]
    # With include_last_offset there is one offset more than there are bags.
    counts = [int(tensor.shape[0]) - value.shape.dimensions[0] for tensor, value in zip(described, values, strict=True)]
    return [pad(ctx, value, {0: PadAxis(0, count)}) for value, count in zip(values, counts, strict=True)]
