"""Binary search in sorted sequences: `searchsorted` and `bucketize`."""

from __future__ import annotations

import torch

from easytorch.backends.dtypes import DType
from easytorch.backends.graph import Op
from easytorch.frontend.aten.indexing import gather
from easytorch.frontend.context import Context
from easytorch.frontend.errors import DataDependentError
from easytorch.frontend.registry import lowering

aten = torch.ops.aten


def _positions(ctx: Context, sequence: Op, values: Op, right: bool) -> Op:
    """(rows, n) in order, (rows, m) -> (rows, m) int64: by bisection, whose comparisons with NaN go to the right."""
    b, count = ctx.builder, sequence.shape.dimensions[1]
    low, high = (ctx.full(values.shape.dimensions, number, DType.INT64) for number in (0, count))
    if not sequence.shape.size or not values.shape.size:
        return low
    one, last = ctx.scalar(1, DType.INT64), ctx.scalar(count - 1, DType.INT64)
    for _ in range(count.bit_length()):
        middle = b.add(low, b.div(b.sub(high, low), ctx.scalar(2, DType.INT64)))
        found = gather(ctx, sequence, 1, b.min(middle, last))
        before = b.logical_not(b.greater_than(found, values) if right else b.greater_or_equal(found, values))
        before = b.logical_and(before, b.less_than(low, high))
        low, high = b.where(before, b.add(middle, one), low), b.where(before, high, middle)
    return low


@lowering(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def searchsorted(
    ctx: Context,
    sequence: Op,
    values: Op | float,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Op | None = None,
) -> Op:
    """Positions in the last axis of `sequence`, whose other axes are those of the values."""
    # A number is compared in the type of the sequence or, if that holds no fractions, in torch's default float.
    kind = ctx.promote(sequence, values)
    values = ctx.cast(values, kind)
    if sorter is not None:
        sequence = gather(ctx, sequence, -1, sorter)
    sequence = ctx.cast(sequence, kind)
    count = sequence.shape.dimensions[-1]
    flat = ctx.reshape(sequence, (sequence.shape.size // count if count else 1, count))
    if sequence.shape.rank == 1:
        lines = ctx.reshape(values, (1, values.shape.size))
    else:
        lines = ctx.reshape(values, (flat.shape.dimensions[0], values.shape.dimensions[-1]))
    found = ctx.reshape(_positions(ctx, flat, lines, right or side == "right"), values.shape.dimensions)
    return ctx.cast(found, DType.INT32) if out_int32 else found


@lowering(aten.bucketize.Tensor, aten.bucketize.Scalar)
def bucketize(ctx: Context, values: Op | float, boundaries: Op, *, out_int32: bool = False, right: bool = False) -> Op:
    """`searchsorted` of one sequence."""
    return searchsorted(ctx, boundaries, values, out_int32=out_int32, right=right)


@lowering(aten.bincount.default)
def bincount(ctx: Context, x: Op, weights: Op | None = None, minlength: int = 0) -> Op:
    raise DataDependentError(
        "bincount: how many counts there are depends on the data, and a compiled program has its sizes fixed; add ones "
        "at the values, torch.zeros(size).scatter_add(0, x, torch.ones_like(x)), or use torch.histc"
    )


@lowering(aten._unique2.default, aten.unique_consecutive.default, aten.unique_dim.default)
def unique(ctx: Context, x: Op, *args: object, **kwargs: object) -> Op:
    raise DataDependentError(
        "unique: how many elements differ depends on the data, and a compiled program has its sizes fixed; "
        "torch.sort and a comparison of neighbours mark the first of each"
    )
