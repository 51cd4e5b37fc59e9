"""Discrete Fourier transforms over any axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from easytorch.backends.dtypes import DType
from easytorch.backends.graph import Op
from easytorch.backends.types import FFTType, PadAxis
from easytorch.frontend.arrays import cut, move, pad
from easytorch.frontend.context import Context
from easytorch.frontend.registry import lowering

aten = torch.ops.aten

# ATen's fft_norm_mode: not scaled, by the root of the size, by the size.
_NONE, _BY_ROOT, _BY_SIZE = range(3)


def _transformed(ctx: Context, x: Op, axis: int, kind: FFTType, length: int) -> Op:
    """One axis; the inverse is not divided by the length, as the builder's is."""
    last = x.shape.rank - 1
    result = move(ctx, ctx.builder.fft(move(ctx, x, (axis,), (last,)), kind, (length,)), (last,), (axis,))
    if kind in (FFTType.FORWARD, FFTType.FORWARD_REAL):
        return result
    return ctx.builder.mul(result, ctx.scalar(length, result.shape.dtype))


def _normalized(ctx: Context, x: Op, mode: int, size: int) -> Op:
    if mode == _NONE:
        return x
    scale = 1 / size if mode == _BY_SIZE else 1 / math.sqrt(size)
    return ctx.builder.mul(x, ctx.scalar(scale, x.shape.dtype))


@lowering(aten._fft_c2c.default)
def fft_c2c(ctx: Context, x: Op, dim: Sequence[int], normalization: int, forward: bool) -> Op:
    axes = [ctx.axis(axis, x.shape.rank) for axis in dim]
    size = math.prod(x.shape.dimensions[axis] for axis in axes)
    for axis in axes:
        kind = FFTType.FORWARD if forward else FFTType.INVERSE
        x = _transformed(ctx, x, axis, kind, x.shape.dimensions[axis])
    return _normalized(ctx, x, normalization, size)


@lowering(aten._fft_r2c.default)
def fft_r2c(ctx: Context, x: Op, dim: Sequence[int], normalization: int, onesided: bool) -> Op:
    """The last of `dim` is the one that is halved with `onesided`."""
    axes = [ctx.axis(axis, x.shape.rank) for axis in dim]
    x = ctx.wide(x)
    if not onesided:
        zeros = ctx.full(x.shape.dimensions, 0, x.shape.dtype)
        return fft_c2c(ctx, ctx.builder.complex(x, zeros), axes, normalization, True)
    size = math.prod(x.shape.dimensions[axis] for axis in axes)
    result = _transformed(ctx, x, axes[-1], FFTType.FORWARD_REAL, x.shape.dimensions[axes[-1]])
    return _normalized(ctx, fft_c2c(ctx, result, axes[:-1], _NONE, True), normalization, size)


@lowering(aten._fft_c2r.default)
def fft_c2r(ctx: Context, x: Op, dim: Sequence[int], normalization: int, last_dim_size: int) -> Op:
    """The last of `dim` is the halved axis, whose other half is the complex conjugate."""
    axes = [ctx.axis(axis, x.shape.rank) for axis in dim]
    last = axes[-1]
    size = math.prod(x.shape.dimensions[axis] for axis in axes[:-1]) * last_dim_size
    x = fft_c2c(ctx, x, axes[:-1], _NONE, False)
    wanted, given = last_dim_size // 2 + 1, x.shape.dimensions[last]
    x = cut(ctx, x, last, 0, wanted) if given > wanted else pad(ctx, x, {last: PadAxis(0, wanted - given)})
    return _normalized(ctx, _transformed(ctx, x, last, FFTType.INVERSE_REAL, last_dim_size), normalization, size)


@lowering(aten.view_as_complex.default)
def view_as_complex(ctx: Context, x: Op) -> Op:
    """(..., 2) -> (...)."""
    axis, rest = x.shape.rank - 1, x.shape.dimensions[:-1]
    parts = (ctx.reshape(cut(ctx, x, axis, number, number + 1), rest) for number in range(2))
    return ctx.builder.complex(*parts)


@lowering(aten.view_as_real.default)
def view_as_real(ctx: Context, x: Op) -> Op:
    """(...) -> (..., 2)."""
    b, rest = ctx.builder, x.shape.dimensions
    return b.concatenate(len(rest), *(ctx.reshape(part, (*rest, 1)) for part in (b.real(x), b.imag(x))))


@lowering(aten.complex.default)
def complex_of(ctx: Context, real: Op, imag: Op) -> Op:
    return ctx.builder.complex(*ctx.operands(real, imag))


@lowering(aten.polar.default)
def polar(ctx: Context, absolute: Op, angle: Op) -> Op:
    b = ctx.builder
    absolute, angle = ctx.operands(absolute, angle)
    return b.complex(b.mul(absolute, b.cos(angle)), b.mul(absolute, b.sin(angle)))


@lowering(aten.angle.default)
def angle(ctx: Context, x: Op) -> Op:
    """The angle of x: 0 or pi of real numbers, NaN of NaN."""
    b = ctx.builder
    if x.shape.dtype.is_complex:
        return b.atan2(b.imag(x), b.real(x))
    x = ctx.cast(x, ctx.floating(x.shape.dtype))
    zero = ctx.scalar(0, x.shape.dtype)
    return b.where(b.is_nan(x), x, b.where(b.less_than(x, zero), ctx.scalar(math.pi, x.shape.dtype), zero))


@lowering(aten._conj.default, aten._conj_physical.default, aten.conj_physical.default)
def conj(ctx: Context, x: Op) -> Op:
    return ctx.builder.conj(x) if x.shape.dtype.is_complex else x


@lowering(aten.resolve_conj.default, aten.resolve_neg.default)
def resolved(ctx: Context, x: Op) -> Op:
    return x


@lowering(aten._neg_view.default)
def neg_view(ctx: Context, x: Op) -> Op:
    return ctx.builder.neg(x)


@lowering(aten.real.default)
def real(ctx: Context, x: Op) -> Op:
    return ctx.builder.real(x) if x.shape.dtype.is_complex else x


@lowering(aten.imag.default)
def imag(ctx: Context, x: Op) -> Op:
    return ctx.builder.imag(x)


@lowering(aten.isreal.default)
def isreal(ctx: Context, x: Op) -> Op:
    if not x.shape.dtype.is_complex:
        return ctx.full(x.shape.dimensions, True, DType.BOOL)
    imaginary = ctx.builder.imag(x)
    return ctx.builder.equal(imaginary, ctx.scalar(0, imaginary.shape.dtype))
