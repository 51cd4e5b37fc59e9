"""torch's primitive operations, in which its decompositions of ATen end, and ATen's that would end in unusable ones.

The operands of a primitive are of one shape and one type already.
"""

from __future__ import annotations

import math

import ml_dtypes
import torch

from easytorch.backends.builder import Builder
from easytorch.backends.dtypes import UNSIGNED, DType
from easytorch.backends.graph import Op
from easytorch.frontend.aten import pointwise
from easytorch.frontend.context import Context
from easytorch.frontend.registry import lowering

aten, prims = torch.ops.aten, torch.ops.prims
_SAME_SIZE = {2: DType.INT16, 4: DType.INT32, 8: DType.INT64}  # bytes -> an integer of as many

lowering(prims.abs.default)(pointwise.abs)
lowering(prims.neg.default)(pointwise.neg)
lowering(prims.where.default)(pointwise.where)


@lowering(prims.div.default)
def div(ctx: Context, x: Op, other: Op) -> Op:
    """x / other; of integers rounded toward zero."""
    return ctx.builder.div(*ctx.operands(x, other))


@lowering(prims.gcd.default)
def gcd(ctx: Context, x: Op, other: Op) -> Op:
    """Euclid's algorithm on all elements at once, as long as one of them needs it."""
    divisor, number = (pointwise.abs(ctx, value) for value in ctx.operands(x, other))
    kind, axes = divisor.shape.dtype, tuple(range(divisor.shape.rank))
    zero, one = ctx.scalar(0, kind), ctx.scalar(1, kind)

    def unfinished(b: Builder, divisor: Op, number: Op) -> Op:
        left = b.not_equal(divisor, zero)
        return b.reduce_logical_or(left, *axes) if axes else left

    def step(b: Builder, divisor: Op, number: Op) -> tuple[Op, Op]:
        done = b.equal(divisor, zero)
        rest = b.rem(number, b.where(done, b.add(divisor, one), divisor))
        return b.where(done, divisor, rest), b.where(done, number, divisor)

    return ctx.builder.while_loop(unfinished, step, divisor, number)[1]


@lowering(aten.signbit.default)
def signbit(ctx: Context, x: Op) -> Op:
    """True of -0.0; of NaN as its bit is, which a conversion may have changed."""
    b, kind = ctx.builder, x.shape.dtype
    if kind is DType.BOOL or kind in UNSIGNED:
        return ctx.full(x.shape.dimensions, False, DType.BOOL)
    if kind.is_float:
        x = b.bitcast(x, _SAME_SIZE[kind.size])
    return b.less_than(x, ctx.scalar(0, x.shape.dtype))


@lowering(aten.copysign.Tensor, aten.copysign.Scalar)
def copysign(ctx: Context, x: Op, other: Op | float) -> Op:
    """torch's decomposition ends in prims.signbit, whose dtype torch (2.13) states as that of its operand."""
    kind = ctx.floating(ctx.promote(x, other))
    first, second = ctx.operands(x, other, dtype=kind)
    size = ctx.builder.abs(first)
    return pointwise.where(ctx, signbit(ctx, second), ctx.builder.neg(size), size)


@lowering(prims.fmax.default)
def fmax(ctx: Context, x: Op, other: Op) -> Op:
    return _but_nan(ctx, x, other, ctx.builder.max(*ctx.operands(x, other)))


@lowering(prims.fmin.default)
def fmin(ctx: Context, x: Op, other: Op) -> Op:
    return _but_nan(ctx, x, other, ctx.builder.min(*ctx.operands(x, other)))


def _but_nan(ctx: Context, x: Op, other: Op, result: Op) -> Op:
    """`result`, but where exactly one operand is NaN the other operand."""
    if not result.shape.dtype.is_float:
        return result
    b = ctx.builder
    return b.where(b.is_nan(x), other, b.where(b.is_nan(other), x, result))


@lowering(prims.shift_left.default)
def shift_left(ctx: Context, x: Op, places: Op) -> Op:
    """0 where all bits go, or `places` is negative."""
    b, kind = ctx.builder, x.shape.dtype
    shifted = b.shift_left(x, _valid_places(ctx, places, 0))
    return b.where(_shifts_out(ctx, places), ctx.scalar(0, kind), shifted)


@lowering(prims.shift_right_arithmetic.default)
def shift_right_arithmetic(ctx: Context, x: Op, places: Op) -> Op:
    """The sign alone where all bits go, or `places` is negative."""
    b, kind = ctx.builder, x.shape.dtype
    if kind in UNSIGNED:
        shifted = b.shift_right_logical(x, _valid_places(ctx, places, 0))
        return b.where(_shifts_out(ctx, places), ctx.scalar(0, kind), shifted)
    return b.shift_right_arithmetic(x, _valid_places(ctx, places, 8 * kind.size - 1))


def _shifts_out(ctx: Context, places: Op) -> Op:
    b, kind = ctx.builder, places.shape.dtype
    far = b.greater_or_equal(places, ctx.scalar(8 * kind.size, kind))
    return far if kind in UNSIGNED else b.logical_or(far, b.less_than(places, ctx.scalar(0, kind)))


def _valid_places(ctx: Context, places: Op, instead: int) -> Op:
    """`places`, and `instead` where a shift by so many is not defined by every backend."""
    return ctx.builder.where(_shifts_out(ctx, places), ctx.scalar(instead, places.shape.dtype), places)


@lowering(prims.hypot.default)
def hypot(ctx: Context, x: Op, other: Op) -> Op:
    """sqrt(x^2 + y^2) without overflow: of an infinity infinite, even beside NaN."""
    b, kind = ctx.builder, x.shape.dtype
    first, second = (b.abs(ctx.wide(value)) for value in (x, other))
    large, small = b.max(first, second), b.min(first, second)
    zero, infinite = ctx.scalar(0, large.shape.dtype), ctx.scalar(math.inf, large.shape.dtype)
    # of two zeros, and of two infinities, the quotient would be NaN
    ratio = b.div(small, b.where(b.equal(large, zero), ctx.scalar(1, large.shape.dtype), large))
    length = b.mul(large, b.sqrt(b.add(b.mul(ratio, ratio), ctx.scalar(1, large.shape.dtype))))
    unbounded = b.logical_or(b.equal(first, infinite), b.equal(second, infinite))
    return ctx.cast(b.where(unbounded, infinite, length), kind)


@lowering(prims.nextafter.default)
def nextafter(ctx: Context, x: Op, other: Op) -> Op:
    """The next number after x on the way to `other`: its bits, counted, plus or minus one."""
    b, kind = ctx.builder, x.shape.dtype
    integer = _SAME_SIZE[kind.size]
    bits, zero, one = b.bitcast(x, integer), ctx.scalar(0, integer), ctx.scalar(1, integer)
    smallest = ctx.scalar(1, integer)
    towards_zero = b.not_equal(b.greater_than(other, x), b.greater_than(x, ctx.scalar(0, kind)))
    stepped = b.bitcast(b.where(towards_zero, b.sub(bits, one), b.add(bits, one)), kind)
    least = b.bitcast(ctx.expand(smallest, x.shape.dimensions), kind)
    from_zero = b.where(b.greater_than(other, x), least, b.neg(least))
    found = b.where(b.equal(b.shift_left(bits, one), zero), from_zero, stepped)
    found = b.where(b.equal(x, other), other, found)
    return b.where(b.logical_or(b.is_nan(x), b.is_nan(other)), b.add(x, other), found)


@lowering(prims.frexp.default)
def frexp(ctx: Context, x: Op) -> tuple[Op, Op]:
    """x as a number from 1/2 to 1 times a power of two; what is not finite, or zero, as itself."""
    b, kind = ctx.builder, x.shape.dtype
    integer, info = _SAME_SIZE[kind.size], ml_dtypes.finfo(kind.numpy)
    places, most = int(info.nmant), 2 ** int(info.iexp) - 1
    half = most // 2 - 1  # the exponent's bits of 1/2
    zero = ctx.scalar(0, kind)
    normal = b.greater_or_equal(b.abs(x), ctx.scalar(float(info.smallest_normal), kind))
    scaled = b.where(normal, x, b.mul(x, ctx.scalar(2.0 ** (places + 1), kind)))
    bits = b.bitcast(scaled, integer)
    exponent = b.bitwise_and(b.shift_right_logical(bits, ctx.scalar(places, integer)), ctx.scalar(most, integer))
    others = ctx.scalar(~(most << places), integer)
    mantissa = b.bitcast(b.bitwise_or(b.bitwise_and(bits, others), ctx.scalar(half << places, integer)), kind)
    shift = b.where(normal, ctx.scalar(half, integer), ctx.scalar(half + places + 1, integer))
    exponent = ctx.cast(b.sub(exponent, shift), DType.INT32)
    itself = b.logical_or(b.equal(x, zero), b.logical_not(b.is_finite(x)))
    return b.where(itself, x, mantissa), b.where(itself, ctx.scalar(0, DType.INT32), exponent)
