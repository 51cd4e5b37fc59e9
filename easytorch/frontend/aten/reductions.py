"""Reductions over axes. Narrow floats are accumulated in float32, integers in int64."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from easytorch.backends.dtypes import DType, dtype_of
from easytorch.backends.graph import Op
from easytorch.frontend.context import Context
from easytorch.frontend.registry import lowering

aten = torch.ops.aten
Axes = int | Iterable[int] | None


def _accumulated(ctx: Context, x: Op, dtype: torch.dtype | None) -> tuple[Op, DType]:
    """x in the type to accumulate in, and the type of the result."""
    kind = x.shape.dtype if dtype is None else dtype_of(dtype)
    if dtype is None and (kind.is_integer or kind is DType.BOOL):
        kind = DType.INT64
    return ctx.wide(ctx.cast(x, kind)), kind


@lowering(aten.sum.default, aten.sum.dim_IntList)
def sum(ctx: Context, x: Op, dim: Axes = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Op:
    wide, kind = _accumulated(ctx, x, dtype)
    return ctx.cast(ctx.reduce(ctx.builder.reduce_sum, wide, dim, keepdim), kind)


@lowering(aten.mean.default, aten.mean.dim)
def mean(ctx: Context, x: Op, dim: Axes = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Op:
    wide, kind = _accumulated(ctx, x, dtype)
    count = math.prod(x.shape.dimensions[axis] for axis in ctx.axes(dim, x.shape.rank))
    total = ctx.reduce(ctx.builder.reduce_sum, wide, dim, keepdim)
    return ctx.cast(ctx.builder.div(total, ctx.scalar(count, wide.shape.dtype)), kind)


@lowering(aten.prod.default)
def prod(ctx: Context, x: Op, *, dtype: torch.dtype | None = None) -> Op:
    wide, kind = _accumulated(ctx, x, dtype)
    return ctx.cast(ctx.reduce(ctx.builder.reduce_product, wide, None), kind)


@lowering(aten.prod.dim_int)
def prod_dim(ctx: Context, x: Op, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Op:
    wide, kind = _accumulated(ctx, x, dtype)
    return ctx.cast(ctx.reduce(ctx.builder.reduce_product, wide, dim, keepdim), kind)


@lowering(aten.amax.default)
def amax(ctx: Context, x: Op, dim: Axes = (), keepdim: bool = False) -> Op:
    return _extreme(ctx, x, dim, keepdim, greatest=True)


@lowering(aten.amin.default)
def amin(ctx: Context, x: Op, dim: Axes = (), keepdim: bool = False) -> Op:
    return _extreme(ctx, x, dim, keepdim, greatest=False)


@lowering(aten.max.default)
def max_all(ctx: Context, x: Op) -> Op:
    return _extreme(ctx, x, None, False, greatest=True)


@lowering(aten.min.default)
def min_all(ctx: Context, x: Op) -> Op:
    return _extreme(ctx, x, None, False, greatest=False)


def _extreme(ctx: Context, x: Op, dim: Axes, keepdim: bool, greatest: bool) -> Op:
    if x.shape.dtype is DType.BOOL:
        method = ctx.builder.reduce_logical_or if greatest else ctx.builder.reduce_logical_and
    else:
        method = ctx.builder.reduce_max if greatest else ctx.builder.reduce_min
    return ctx.reduce(method, x, dim, keepdim)


@lowering(aten.any.default, aten.any.dim, aten.any.dims)
def any(ctx: Context, x: Op, dim: Axes = None, keepdim: bool = False) -> Op:
    return _truth(ctx, x, dim, keepdim, ctx.builder.reduce_logical_or)


@lowering(aten.all.default, aten.all.dim, aten.all.dims)
def all(ctx: Context, x: Op, dim: Axes = None, keepdim: bool = False) -> Op:
    return _truth(ctx, x, dim, keepdim, ctx.builder.reduce_logical_and)


def _truth(ctx: Context, x: Op, dim: Axes, keepdim: bool, method: object) -> Op:
    """Of uint8 the answer is uint8, as ATen has it."""
    kind = DType.UINT8 if x.shape.dtype is DType.UINT8 else DType.BOOL
    return ctx.cast(ctx.reduce(method, ctx.cast(x, DType.BOOL), dim, keepdim), kind)  # type: ignore[arg-type]


@lowering(aten.argmax.default)
def argmax(ctx: Context, x: Op, dim: int | None = None, keepdim: bool = False) -> Op:
    return _arg(ctx, x, dim, keepdim, is_min=False)


@lowering(aten.argmin.default)
def argmin(ctx: Context, x: Op, dim: int | None = None, keepdim: bool = False) -> Op:
    return _arg(ctx, x, dim, keepdim, is_min=True)


def _arg(ctx: Context, x: Op, dim: int | None, keepdim: bool, is_min: bool) -> Op:
    """The first of equal ones; without `dim` the place in the flattened tensor."""
    if x.shape.dtype is DType.BOOL:
        x = ctx.cast(x, DType.UINT8)
    if not x.shape.rank:
        return ctx.scalar(0, DType.INT64)
    flat = ctx.reshape(x, (-1,)) if dim is None else x
    axis = 0 if dim is None else ctx.axis(dim, x.shape.rank)
    found = ctx.builder.arg_min_max(flat, axis, DType.INT64, is_min)
    if not keepdim:
        return found
    return ctx.reshape(found, (1,) * x.shape.rank) if dim is None else ctx.keep(found, x, (axis,))


@lowering(aten.max.dim)
def max_dim(ctx: Context, x: Op, dim: int, keepdim: bool = False) -> tuple[Op, Op]:
    return amax(ctx, x, dim, keepdim), argmax(ctx, x, dim, keepdim)


@lowering(aten.min.dim)
def min_dim(ctx: Context, x: Op, dim: int, keepdim: bool = False) -> tuple[Op, Op]:
    return amin(ctx, x, dim, keepdim), argmin(ctx, x, dim, keepdim)


def moments(ctx: Context, wide: Op, axes: Sequence[int], correction: float = 0) -> tuple[Op, Op]:
    """Mean and variance over `axes`, which stay with size one; the variance by the deviations from the mean."""
    b = ctx.builder
    count = math.prod(wide.shape.dimensions[axis] for axis in axes)
    total = ctx.scalar(count, wide.shape.dtype)
    average = b.div(ctx.reduce(b.reduce_sum, wide, axes, True), total) if axes else wide
    deviation = b.sub(wide, average)
    complex = wide.shape.dtype.is_complex
    square = b.real(b.mul(deviation, b.conj(deviation))) if complex else b.mul(deviation, deviation)
    freedom = ctx.scalar(max(count - correction, 0), square.shape.dtype)
    variance = b.div(ctx.reduce(b.reduce_sum, square, axes, True) if axes else square, freedom)
    return average, variance


def _variance(ctx: Context, x: Op, dim: Axes, correction: float | None, keepdim: bool) -> tuple[Op, Op]:
    axes = ctx.axes(dim, x.shape.rank)
    average, variance = moments(ctx, ctx.wide(x), axes, 1 if correction is None else correction)
    if not keepdim:
        kept = [size for axis, size in enumerate(x.shape.dimensions) if axis not in axes]
        average, variance = ctx.reshape(average, kept), ctx.reshape(variance, kept)
    return ctx.cast(average, x.shape.dtype), ctx.cast(variance, x.shape.dtype.real)


@lowering(aten.var.correction)
def var(ctx: Context, x: Op, dim: Axes = None, *, correction: float | None = None, keepdim: bool = False) -> Op:
    return _variance(ctx, x, dim, correction, keepdim)[1]


@lowering(aten.var.default)
def var_default(ctx: Context, x: Op, unbiased: bool = True) -> Op:
    return var(ctx, x, None, correction=int(unbiased))


@lowering(aten.var.dim)
def var_dim(ctx: Context, x: Op, dim: Axes, unbiased: bool = True, keepdim: bool = False) -> Op:
    return var(ctx, x, dim, correction=int(unbiased), keepdim=keepdim)


@lowering(aten.var_mean.correction)
def var_mean(
    ctx: Context, x: Op, dim: Axes = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Op, Op]:
    average, variance = _variance(ctx, x, dim, correction, keepdim)
    return variance, average


@lowering(aten.std.correction)
def std(ctx: Context, x: Op, dim: Axes = None, *, correction: float | None = None, keepdim: bool = False) -> Op:
    return ctx.builder.sqrt(var(ctx, x, dim, correction=correction, keepdim=keepdim))
