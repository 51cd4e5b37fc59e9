"""Cumulative sums, products and extremes along an axis, in log2(length) steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from easytorch.backends.dtypes import DType
from easytorch.backends.graph import Op
from easytorch.backends.types import PadAxis
from easytorch.frontend.arrays import highest, lowest, pad
from easytorch.frontend.context import Context
from easytorch.frontend.registry import lowering

aten = torch.ops.aten


def scan(
    ctx: Context,
    operands: Sequence[Op],
    axis: int,
    neutral: Sequence[Any],
    combine: Callable[..., Sequence[Op]],
) -> list[Op]:
    """The results of the associative `combine(*earlier, *later)` over all elements up to each, along `axis`.

    Hillis and Steele (1986): what stands a power of two before is taken in, the powers in turn.
    """
    found = list(operands)
    step = 1
    while step < operands[0].shape.dimensions[axis]:
        shift = {axis: PadAxis(step, -step)}
        earlier = [pad(ctx, x, shift, value) for x, value in zip(found, neutral, strict=True)]
        found = list(combine(*earlier, *found))
        step *= 2
    return found


def _accumulated(ctx: Context, x: Op, dim: int, dtype: torch.dtype | None, neutral: int, method: str) -> Op:
    kind = ctx.dtype() if dtype is None else dtype
    x = ctx.cast(x, kind)
    if not x.shape.rank:
        return x
    combine = getattr(ctx.builder, method)
    axis = ctx.axis(dim, x.shape.rank)
    (result,) = scan(ctx, [ctx.wide(x)], axis, [neutral], lambda earlier, later: [combine(earlier, later)])
    return ctx.cast(result, kind)


@lowering(aten.cumsum.default)
def cumsum(ctx: Context, x: Op, dim: int, *, dtype: torch.dtype | None = None) -> Op:
    return _accumulated(ctx, x, dim, dtype, 0, "add")


@lowering(aten.cumprod.default)
def cumprod(ctx: Context, x: Op, dim: int, *, dtype: torch.dtype | None = None) -> Op:
    return _accumulated(ctx, x, dim, dtype, 1, "mul")


@lowering(aten.logcumsumexp.default)
def logcumsumexp(ctx: Context, x: Op, dim: int) -> Op:
    b = ctx.builder
    if not x.shape.rank:
        return x

    def combine(earlier: Op, later: Op) -> list[Op]:
        top = b.max(earlier, later)
        # Of two that are -inf the difference would be NaN; of two that are inf as well.
        same = b.equal(earlier, later)
        apart = b.where(same, ctx.scalar(0, top.shape.dtype), b.sub(b.min(earlier, later), top))
        return [b.add(top, b.log1p(b.exp(apart)))]

    (result,) = scan(ctx, [ctx.wide(x)], ctx.axis(dim, x.shape.rank), [lowest(DType.FLOAT32)], combine)
    return ctx.cast(result, x.shape.dtype)


def _running_extreme(ctx: Context, x: Op, dim: int, is_max: bool) -> tuple[Op, Op]:
    b = ctx.builder
    if not x.shape.rank:
        return x, ctx.scalar(0, DType.INT64)
    axis = ctx.axis(dim, x.shape.rank)
    places = ctx.iota(x.shape.dimensions, axis, DType.INT64)
    before = lowest(x.shape.dtype) if is_max else highest(x.shape.dtype)
    better = b.greater_or_equal if is_max else b.less_or_equal

    def combine(value: Op, place: Op, later: Op, later_place: Op) -> tuple[Op, Op]:
        # The last of several is the one, and the last NaN.
        taken = better(later, value)
        if x.shape.dtype.is_float:
            taken = b.logical_or(taken, b.is_nan(later))
        return b.where(taken, later, value), b.where(taken, later_place, place)

    values, indices = scan(ctx, [x, places], axis, [before, 0], combine)
    return values, indices


@lowering(aten.cummax.default)
def cummax(ctx: Context, x: Op, dim: int) -> tuple[Op, Op]:
    return _running_extreme(ctx, x, dim, is_max=True)


@lowering(aten.cummin.default)
def cummin(ctx: Context, x: Op, dim: int) -> tuple[Op, Op]:
    return _running_extreme(ctx, x, dim, is_max=False)
