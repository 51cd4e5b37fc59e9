"""Tensors made from sizes and numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from easytorch.backends.dtypes import DType, dtype_of
from easytorch.backends.graph import Op
from easytorch.frontend.context import Context
from easytorch.frontend.registry import lowering

aten = torch.ops.aten
Number = int | float | complex | bool


@lowering(aten.full.default)
def full(ctx: Context, size: Sequence[int], value: Number | Op, **options: Any) -> Op:
    return ctx.full(size, value, ctx.dtype())


@lowering(aten.zeros.default, aten.empty.memory_format, aten.empty_strided.default, aten.empty_permuted.default)
def zeros(ctx: Context, size: Sequence[int], *layout: Any, **options: Any) -> Op:
    """Also `empty`: uninitialized tensors are zero."""
    return ctx.full(size, 0, ctx.dtype())


@lowering(aten.ones.default)
def ones(ctx: Context, size: Sequence[int], **options: Any) -> Op:
    return ctx.full(size, 1, ctx.dtype())


@lowering(aten.full_like.default)
def full_like(ctx: Context, x: Op, value: Number | Op, **options: Any) -> Op:
    return ctx.full(x.shape.dimensions, value, ctx.dtype())


@lowering(aten.zeros_like.default, aten.empty_like.default)
def zeros_like(ctx: Context, x: Op, **options: Any) -> Op:
    return ctx.full(x.shape.dimensions, 0, ctx.dtype())


@lowering(aten.ones_like.default)
def ones_like(ctx: Context, x: Op, **options: Any) -> Op:
    return ctx.full(x.shape.dimensions, 1, ctx.dtype())


@lowering(aten.new_zeros.default, aten.new_empty.default, aten.new_empty_strided.default)
def new_zeros(ctx: Context, x: Op, size: Sequence[int], *layout: Any, **options: Any) -> Op:
    return ctx.full(size, 0, ctx.dtype())


@lowering(aten.new_ones.default)
def new_ones(ctx: Context, x: Op, size: Sequence[int], **options: Any) -> Op:
    return ctx.full(size, 1, ctx.dtype())


@lowering(aten.new_full.default)
def new_full(ctx: Context, x: Op, size: Sequence[int], value: Number | Op, **options: Any) -> Op:
    return ctx.full(size, value, ctx.dtype())


@lowering(aten.fill.Scalar, aten.fill.Tensor)
def fill(ctx: Context, x: Op, value: Number | Op) -> Op:
    return ctx.full(x.shape.dimensions, value, x.shape.dtype)


@lowering(aten.scalar_tensor.default)
def scalar_tensor(ctx: Context, value: Number | Op, **options: Any) -> Op:
    return ctx.cast(value, ctx.dtype())


@lowering(aten.arange.default)
def arange(ctx: Context, end: float, **options: Any) -> Op:
    return arange_step(ctx, 0, end)


@lowering(aten.arange.start)
def arange_start(ctx: Context, start: float, end: float, **options: Any) -> Op:
    return arange_step(ctx, start, end)


@lowering(aten.arange.start_step)
def arange_step(ctx: Context, start: float, end: float, step: float = 1, **options: Any) -> Op:
    """start + step * i, computed in float64 for floats (ATen's accumulation type on the CPU)."""
    kind = ctx.dtype()
    count = max(0, math.ceil((end - start) / step))
    wide = DType.FLOAT64 if kind.is_float else DType.INT64
    counted = ctx.iota((count,), 0, wide)
    if step != 1:
        counted = ctx.builder.mul(counted, ctx.scalar(step, wide))
    if start != 0:
        counted = ctx.builder.add(counted, ctx.scalar(start, wide))
    return ctx.cast(counted, kind)


@lowering(aten.eye.default)
def eye(ctx: Context, n: int, **options: Any) -> Op:
    return eye_m(ctx, n, n)


@lowering(aten.eye.m)
def eye_m(ctx: Context, n: int, m: int, **options: Any) -> Op:
    b = ctx.builder
    rows, columns = (ctx.iota((n, m), axis, DType.INT32) for axis in (0, 1))
    return ctx.cast(b.equal(rows, columns), ctx.dtype())


def _triangle(ctx: Context, x: Op, diagonal: int, lower: bool) -> Op:
    b = ctx.builder
    dims = x.shape.dimensions[-2:]
    distance = b.sub(ctx.iota(dims, 1, DType.INT32), ctx.iota(dims, 0, DType.INT32))
    limit = ctx.scalar(diagonal, DType.INT32)
    kept = b.less_or_equal(distance, limit) if lower else b.greater_or_equal(distance, limit)
    return b.where(ctx.expand(kept, x.shape.dimensions), x, ctx.full(x.shape.dimensions, 0, x.shape.dtype))


@lowering(aten.tril.default)
def tril(ctx: Context, x: Op, diagonal: int = 0) -> Op:
    return _triangle(ctx, x, diagonal, lower=True)


@lowering(aten.triu.default)
def triu(ctx: Context, x: Op, diagonal: int = 0) -> Op:
    return _triangle(ctx, x, diagonal, lower=False)


@lowering(torch.ops.prims.iota.default)
def prims_iota(ctx: Context, length: int, *, start: int, step: int, dtype: torch.dtype, **options: Any) -> Op:
    counted = ctx.iota((length,), 0, DType.INT64)
    b = ctx.builder
    return ctx.cast(
        b.add(b.mul(counted, ctx.scalar(step, DType.INT64)), ctx.scalar(start, DType.INT64)), dtype_of(dtype)
    )
