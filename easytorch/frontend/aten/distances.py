"""Distances between rows."""

from __future__ import annotations

import math

import numpy as np
import torch

from easytorch.backends.graph import Op
from easytorch.backends.shapes import Shape
from easytorch.frontend.arrays import take
from easytorch.frontend.context import Context
from easytorch.frontend.registry import lowering

aten = torch.ops.aten


def norm(ctx: Context, x: Op, p: float) -> Op:
    """The p-norm over the last axis of what is not negative."""
    b, axis, kind = ctx.builder, x.shape.rank - 1, x.shape.dtype
    if not x.shape.dimensions[-1]:
        return ctx.full(x.shape.dimensions[:-1], 0, kind)
    if p == 0:
        return b.reduce_sum(ctx.cast(b.not_equal(x, ctx.scalar(0, kind)), kind), axis)
    if p == math.inf:
        return b.reduce_max(x, axis)
    if p == 1:
        return b.reduce_sum(x, axis)
    if p == 2:
        return b.sqrt(b.reduce_sum(b.mul(x, x), axis))
    return b.pow(b.reduce_sum(b.pow(x, ctx.scalar(p, kind)), axis), ctx.scalar(1 / p, kind))


@lowering(aten._cdist_forward.default)
def cdist_forward(ctx: Context, x1: Op, x2: Op, p: float, compute_mode: int | None) -> Op:
    """(*, P, M), (*, R, M) -> (*, P, R); always by differences, which cancel less than products do."""
    b = ctx.builder
    batch = ctx.broadcast_dims(x1.shape.dimensions[:-2], x2.shape.dimensions[:-2])
    (rows, width), columns = x1.shape.dimensions[-2:], x2.shape.dimensions[-2]
    shape = Shape(x1.shape.dtype, (*batch, rows, columns, width))
    lead = len(batch)
    x1, x2 = (ctx.expand(x, (*batch, *x.shape.dimensions[-2:])) for x in (x1, x2))
    one = b.broadcast_in_dim(x1, shape, (*range(lead + 1), lead + 2))
    other = b.broadcast_in_dim(x2, shape, (*range(lead), lead + 1, lead + 2))
    return norm(ctx, b.abs(b.sub(one, other)), p)


@lowering(aten._pdist_forward.default)
def pdist_forward(ctx: Context, x: Op, p: float = 2.0) -> Op:
    """(N, M) -> (N (N - 1) / 2,): every row with each that follows."""
    rows, columns = np.triu_indices(x.shape.dimensions[0], 1)
    if not rows.size:
        return ctx.full((0,), 0, x.shape.dtype)
    difference = ctx.builder.sub(take(ctx, x, 0, rows), take(ctx, x, 0, columns))
    return norm(ctx, ctx.builder.abs(difference), p)
