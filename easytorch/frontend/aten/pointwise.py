"""Operations on elements: arithmetic, comparisons, logic, functions of one and two arguments.

Narrow floats are computed in float32 where ATen composes them inside one kernel (`ctx.wide`), and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from easytorch.backends.dtypes import UNSIGNED, DType
from easytorch.backends.graph import Op
from easytorch.frontend.context import Context
from easytorch.frontend.registry import lowering

aten = torch.ops.aten
Number = int | float | complex | bool
Unary = Callable[[Context, Op], Op]


# --- arithmetic


@lowering(aten.add.Tensor, aten.add.Scalar)
def add(ctx: Context, x: Op, other: Op | Number, alpha: Number = 1) -> Op:
    return _scaled_sum(ctx, ctx.builder.add, x, other, alpha)


@lowering(aten.sub.Tensor, aten.sub.Scalar)
def sub(ctx: Context, x: Op, other: Op | Number, alpha: Number = 1) -> Op:
    return _scaled_sum(ctx, ctx.builder.sub, x, other, alpha)


@lowering(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(ctx: Context, x: Op, other: Op | Number, alpha: Number = 1) -> Op:
    kind = ctx.promote(x, other)
    return _scaled_sum(ctx, ctx.builder.sub, ctx.cast(other, kind), ctx.cast(x, kind), alpha, kind)


def _scaled_sum(
    ctx: Context, method: Callable[[Op, Op], Op], x: Op, other: Any, alpha: Number, dtype: DType | None = None
) -> Op:
    kind = ctx.promote(x, other) if dtype is None else dtype
    first, second = ctx.operands(x, other, dtype=kind)
    if alpha == 1:
        return method(first, second)
    if kind is DType.BOOL:
        return method(first, ctx.builder.logical_and(second, ctx.scalar(bool(alpha), kind)))
    first, second = ctx.wide(first), ctx.wide(second)
    return ctx.cast(method(first, ctx.builder.mul(second, ctx.scalar(alpha, second.shape.dtype))), kind)


@lowering(aten.mul.Tensor, aten.mul.Scalar)
def mul(ctx: Context, x: Op, other: Op | Number) -> Op:
    return ctx.builder.mul(*ctx.operands(x, other))


@lowering(aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor, aten.true_divide.Scalar)
def div(ctx: Context, x: Op, other: Op | Number) -> Op:
    return ctx.builder.div(*ctx.operands(x, other, dtype=ctx.floating(ctx.promote(x, other))))


@lowering(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(ctx: Context, x: Op, other: Op | Number, rounding_mode: str | None = None) -> Op:
    if rounding_mode is None:
        return div(ctx, x, other)
    return floor_divide(ctx, x, other) if rounding_mode == "floor" else _divide_toward_zero(ctx, x, other)


def _divide_toward_zero(ctx: Context, x: Op, other: Op | Number) -> Op:
    kind = ctx.promote(x, other)
    first, second = (ctx.wide(value) for value in ctx.operands(x, other, dtype=kind))
    quotient = ctx.builder.div(first, second)
    return quotient if kind.is_integer else ctx.cast(truncate(ctx, quotient), kind)


@lowering(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(ctx: Context, x: Op, other: Op | Number) -> Op:
    """For floats as in Python: (x - x mod other) / other, rounded to the nearest integer."""
    b, kind = ctx.builder, ctx.promote(x, other)
    first, second = (ctx.wide(value) for value in ctx.operands(x, other, dtype=kind))
    wide = first.shape.dtype
    zero = ctx.scalar(0, wide)
    if kind.is_integer:
        quotient = b.div(first, second)
        if wide in UNSIGNED:
            return quotient
        inexact = b.not_equal(b.rem(first, second), zero)
        below = b.logical_and(inexact, b.not_equal(b.less_than(first, zero), b.less_than(second, zero)))
        return b.where(below, b.sub(quotient, ctx.scalar(1, wide)), quotient)
    modulus = b.rem(first, second)
    opposite = b.not_equal(b.less_than(second, zero), b.less_than(modulus, zero))
    quotient = b.div(b.sub(first, modulus), second)
    adjust = b.logical_and(b.not_equal(modulus, zero), opposite)
    quotient = b.where(adjust, b.sub(quotient, ctx.scalar(1, wide)), quotient)
    floor = b.floor(quotient)
    floor = b.where(
        b.greater_than(b.sub(quotient, floor), ctx.scalar(0.5, wide)), b.add(floor, ctx.scalar(1, wide)), floor
    )
    ratio = b.div(first, second)
    signed_zero = b.mul(zero, ratio)
    result = b.where(b.equal(quotient, zero), signed_zero, floor)
    return ctx.cast(b.where(b.equal(second, zero), ratio, result), kind)


@lowering(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(ctx: Context, x: Op, other: Op | Number) -> Op:
    return ctx.builder.rem(*ctx.operands(x, other))


@lowering(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def remainder(ctx: Context, x: Op | Number, other: Op | Number) -> Op:
    """The remainder with the sign of the divisor."""
    b = ctx.builder
    first, second = ctx.operands(x, other)
    zero = ctx.scalar(0, first.shape.dtype)
    rest = b.rem(first, second)
    opposite = b.not_equal(b.less_than(second, zero), b.less_than(rest, zero))
    return b.where(b.logical_and(b.not_equal(rest, zero), opposite), b.add(rest, second), rest)


@lowering(aten.pow.Tensor_Tensor, aten.pow.Tensor_Scalar, aten.pow.Scalar)
def pow(ctx: Context, x: Op | Number, exponent: Op | Number) -> Op:
    """Small integer powers are products, as in ATen: they are exact where a power function is not."""
    kind = ctx.promote(x, exponent)
    b = ctx.builder
    if isinstance(x, Op) and not isinstance(exponent, Op):
        base = ctx.cast(x, kind)
        if exponent == 0:
            return ctx.full(base.shape.dimensions, 1, kind)
        if exponent == 1:
            return base
        if exponent == 2:
            return b.mul(base, base)
        wide = ctx.wide(base)
        if exponent == 3:
            return ctx.cast(b.mul(b.mul(wide, wide), wide), kind)
        if kind.is_float and exponent in (0.5, -0.5, -1, -2):
            one = ctx.scalar(1, wide.shape.dtype)
            if exponent == 0.5:
                return ctx.cast(b.sqrt(wide), kind)
            if exponent == -0.5:
                return ctx.cast(b.rsqrt(wide), kind)
            return ctx.cast(b.div(one, wide if exponent == -1 else b.mul(wide, wide)), kind)
    first, second = ctx.operands(x, exponent, dtype=kind)
    return b.pow(*_same(ctx, first, second))


@lowering(aten.maximum.default)
def maximum(ctx: Context, x: Op, other: Op) -> Op:
    return ctx.builder.max(*ctx.operands(x, other))


@lowering(aten.minimum.default)
def minimum(ctx: Context, x: Op, other: Op) -> Op:
    return ctx.builder.min(*ctx.operands(x, other))


@lowering(aten.atan2.default)
def atan2(ctx: Context, x: Op, other: Op) -> Op:
    return ctx.builder.atan2(*ctx.operands(x, other, dtype=ctx.floating(ctx.promote(x, other))))


@lowering(aten.clamp.default, aten.clamp.Tensor)
def clamp(ctx: Context, x: Op, min: Op | Number | None = None, max: Op | Number | None = None) -> Op:
    """ATen applies the upper bound last: it holds where the bounds are the wrong way round."""
    kind = ctx.promote(*(value for value in (x, min, max) if value is not None))
    result = ctx.cast(x, kind)
    if min is not None:
        result = ctx.builder.max(*ctx.operands(result, min, dtype=kind))
    if max is not None:
        result = ctx.builder.min(*ctx.operands(result, max, dtype=kind))
    return result


@lowering(aten.clamp_min.default, aten.clamp_min.Tensor)
def clamp_min(ctx: Context, x: Op, min: Op | Number) -> Op:
    return clamp(ctx, x, min)


@lowering(aten.clamp_max.default, aten.clamp_max.Tensor)
def clamp_max(ctx: Context, x: Op, max: Op | Number) -> Op:
    return clamp(ctx, x, None, max)


# --- comparisons and logic


def _built(ctx: Context, method: str, *operands: Op) -> Op:
    """The result of the builder's method of that name."""
    result: Op = getattr(ctx.builder, method)(*operands)
    return result


def _comparisons() -> None:
    table = {
        "eq": "equal",
        "ne": "not_equal",
        "lt": "less_than",
        "le": "less_or_equal",
        "gt": "greater_than",
        "ge": "greater_or_equal",
    }
    for name, method in table.items():

        def compare(ctx: Context, x: Op, other: Op | Number, method: str = method) -> Op:
            return _built(ctx, method, *ctx.operands(x, other))

        packet = getattr(aten, name)
        lowering(packet.Tensor, packet.Scalar)(compare)


def _logic() -> None:
    for name in ("logical_and", "logical_or", "logical_xor"):

        def combine(ctx: Context, x: Op, other: Op, method: str = name) -> Op:
            return _built(ctx, method, *ctx.operands(x, other, dtype=DType.BOOL))

        lowering(getattr(aten, name).default)(combine)
    for name, dunder in (("bitwise_and", "__and__"), ("bitwise_or", "__or__"), ("bitwise_xor", "__xor__")):

        def bits(ctx: Context, x: Op | Number, other: Op | Number, method: str = name) -> Op:
            return _built(ctx, method, *ctx.operands(x, other))

        packet, operator = getattr(aten, name), getattr(aten, dunder)
        lowering(packet.Tensor, packet.Scalar, packet.Scalar_Tensor, operator.Tensor, operator.Scalar)(bits)


_comparisons()
_logic()


@lowering(aten.logical_not.default)
def logical_not(ctx: Context, x: Op) -> Op:
    return ctx.builder.logical_not(ctx.cast(x, DType.BOOL))


@lowering(aten.bitwise_not.default)
def bitwise_not(ctx: Context, x: Op) -> Op:
    return ctx.builder.bitwise_not(x)


@lowering(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def where(ctx: Context, condition: Op, on_true: Op | Number, on_false: Op | Number) -> Op:
    kind = ctx.promote(on_true, on_false)
    aligned = ctx.align(ctx.cast(condition, DType.BOOL), ctx.cast(on_true, kind), ctx.cast(on_false, kind))
    return ctx.builder.where(*_same(ctx, *aligned))


@lowering(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(ctx: Context, x: Op, mask: Op, value: Op | Number) -> Op:
    condition, kept, fill = ctx.align(mask, x, ctx.cast(value, x.shape.dtype))
    return ctx.builder.where(*_same(ctx, condition, fill, kept))


@lowering(aten.isnan.default)
def isnan(ctx: Context, x: Op) -> Op:
    b = ctx.builder
    if x.shape.dtype.is_complex:
        return b.logical_or(b.is_nan(b.real(x)), b.is_nan(b.imag(x)))
    return b.is_nan(x) if x.shape.dtype.is_float else ctx.full(x.shape.dimensions, False, DType.BOOL)


@lowering(aten.isinf.default)
def isinf(ctx: Context, x: Op) -> Op:
    b = ctx.builder
    if x.shape.dtype.is_complex:
        return b.logical_or(isinf(ctx, b.real(x)), isinf(ctx, b.imag(x)))
    if not x.shape.dtype.is_float:
        return ctx.full(x.shape.dimensions, False, DType.BOOL)
    return b.equal(b.abs(x), ctx.scalar(math.inf, x.shape.dtype))


# --- functions of one argument


def _analytic(*names: str) -> None:
    """Of integers and bool they give the default float."""
    for name in names:
        method = {"sigmoid": "logistic"}.get(name, name)

        def function(ctx: Context, x: Op, method: str = method) -> Op:
            return _built(ctx, method, ctx.cast(x, ctx.floating(x.shape.dtype)))

        lowering(getattr(aten, name).default)(function)


_analytic("exp", "expm1", "log", "log1p", "sin", "cos", "tanh", "erf", "sigmoid", "sqrt", "rsqrt")


def _composed(name: str) -> Callable[[Callable[[Context, Op], Op]], Callable[[Context, Op], Op]]:
    """Registers a function of a float or complex op, computed in the wide type, for `aten.<name>.default`."""

    def register(function: Unary) -> Unary:
        def lowered(ctx: Context, x: Op) -> Op:
            kind = ctx.floating(x.shape.dtype)
            return ctx.cast(function(ctx, ctx.wide(ctx.cast(x, kind))), kind)

        lowering(getattr(aten, name).default)(lowered)
        return function

    return register


def _c(ctx: Context, value: Number, like: Op) -> Op:
    return ctx.scalar(value, like.shape.dtype)


@_composed("reciprocal")
def reciprocal(ctx: Context, x: Op) -> Op:
    return ctx.builder.div(_c(ctx, 1, x), x)


@_composed("log2")
def log2(ctx: Context, x: Op) -> Op:
    return ctx.builder.div(ctx.builder.log(x), _c(ctx, math.log(2), x))


@_composed("log10")
def log10(ctx: Context, x: Op) -> Op:
    return ctx.builder.div(ctx.builder.log(x), _c(ctx, math.log(10), x))


@_composed("exp2")
def exp2(ctx: Context, x: Op) -> Op:
    return ctx.builder.pow(*_same(ctx, _c(ctx, 2, x), x))


@_composed("tan")
def tan(ctx: Context, x: Op) -> Op:
    return ctx.builder.div(ctx.builder.sin(x), ctx.builder.cos(x))


@_composed("sinh")
def sinh(ctx: Context, x: Op) -> Op:
    """By expm1 near zero; by exp(x - log 2) far from it, where exp(x) / 2 would overflow too early."""
    b = ctx.builder
    if x.shape.dtype.is_complex:
        return b.mul(b.sub(b.exp(x), b.exp(b.neg(x))), _c(ctx, 0.5, x))
    half = _c(ctx, math.log(2), x)
    far = b.sub(b.exp(b.sub(x, half)), b.exp(b.sub(b.neg(x), half)))
    grown = b.expm1(x)
    near = b.mul(b.add(grown, b.div(grown, b.add(grown, _c(ctx, 1, x)))), _c(ctx, 0.5, x))
    return b.where(b.less_than(b.abs(x), _c(ctx, 1, x)), near, far)


@_composed("cosh")
def cosh(ctx: Context, x: Op) -> Op:
    b = ctx.builder
    if x.shape.dtype.is_complex:
        return b.mul(b.add(b.exp(x), b.exp(b.neg(x))), _c(ctx, 0.5, x))
    half = _c(ctx, math.log(2), x)
    return b.add(b.exp(b.sub(x, half)), b.exp(b.sub(b.neg(x), half)))


@_composed("atan")
def atan(ctx: Context, x: Op) -> Op:
    return ctx.builder.atan2(*_same(ctx, x, _c(ctx, 1, x)))


@_composed("asin")
def asin(ctx: Context, x: Op) -> Op:
    b, one = ctx.builder, _c(ctx, 1, x)
    return b.atan2(x, b.sqrt(b.mul(b.sub(one, x), b.add(one, x))))


@_composed("acos")
def acos(ctx: Context, x: Op) -> Op:
    b, one = ctx.builder, _c(ctx, 1, x)
    return b.atan2(b.sqrt(b.mul(b.sub(one, x), b.add(one, x))), x)


@_composed("asinh")
def asinh(ctx: Context, x: Op) -> Op:
    """sign(x) log(|x| + sqrt(x^2 + 1)), by log1p near zero and by log(2|x|) where the square would overflow."""
    b, one = ctx.builder, _c(ctx, 1, x)
    size = b.abs(x)
    square = b.mul(size, size)
    near = b.log1p(b.add(size, b.div(square, b.add(one, b.sqrt(b.add(square, one))))))
    far = b.add(b.log(size), _c(ctx, math.log(2), x))
    return b.mul(b.sign(x), b.where(b.greater_than(size, _c(ctx, 1e8, x)), far, near))


@_composed("acosh")
def acosh(ctx: Context, x: Op) -> Op:
    """log(x + sqrt(x^2 - 1)), by log1p near one and by log(2x) where the square would overflow."""
    b, one = ctx.builder, _c(ctx, 1, x)
    over = b.sub(x, one)
    near = b.log1p(b.add(over, b.sqrt(b.mul(over, b.add(x, one)))))
    far = b.add(b.log(x), _c(ctx, math.log(2), x))
    return b.where(b.greater_than(x, _c(ctx, 1e8, x)), far, near)


@_composed("atanh")
def atanh(ctx: Context, x: Op) -> Op:
    b = ctx.builder
    return b.mul(b.sub(b.log1p(x), b.log1p(b.neg(x))), _c(ctx, 0.5, x))


@_composed("silu")
def silu(ctx: Context, x: Op) -> Op:
    return ctx.builder.mul(x, ctx.builder.logistic(x))


@_composed("mish")
def mish(ctx: Context, x: Op) -> Op:
    return ctx.builder.mul(x, ctx.builder.tanh(_softplus(ctx, x)))


def _softplus(ctx: Context, x: Op) -> Op:
    """log(1 + exp(x)) without overflow."""
    b = ctx.builder
    return b.add(b.max(x, _c(ctx, 0, x)), b.log1p(b.exp(b.neg(b.abs(x)))))


@lowering(aten.softplus.default)
def softplus(ctx: Context, x: Op, beta: Number = 1, threshold: Number = 20) -> Op:
    b, wide = ctx.builder, ctx.wide(x)
    scaled = b.mul(wide, _c(ctx, beta, wide))
    soft = b.div(b.log1p(b.exp(scaled)), _c(ctx, beta, wide))
    return ctx.cast(b.where(b.greater_than(scaled, _c(ctx, threshold, wide)), wide, soft), x.shape.dtype)


@lowering(aten.neg.default)
def neg(ctx: Context, x: Op) -> Op:
    return ctx.builder.neg(x)


@lowering(aten.abs.default)
def abs(ctx: Context, x: Op) -> Op:
    return x if x.shape.dtype in (DType.BOOL, *UNSIGNED) else ctx.builder.abs(x)


@lowering(aten.sign.default, aten.sgn.default)
def sign(ctx: Context, x: Op) -> Op:
    """Of zero zero, and of NaN zero for a float: ATen's sign compares."""
    b, kind = ctx.builder, x.shape.dtype
    if kind is DType.BOOL:
        return x
    if kind.is_complex:
        return b.sign(x)
    zero = ctx.scalar(0, kind)
    above, below = b.greater_than(x, zero), b.less_than(x, zero)
    return b.sub(ctx.cast(above, kind), ctx.cast(below, kind))


def _round_to_integer(*names: str) -> None:
    for name in names:

        def function(ctx: Context, x: Op, method: str = name) -> Op:
            return _built(ctx, method, x) if x.shape.dtype.is_float else x

        lowering(getattr(aten, name).default)(function)


_round_to_integer("floor", "ceil", "round")


def truncate(ctx: Context, x: Op) -> Op:
    b = ctx.builder
    return b.where(b.less_than(x, ctx.scalar(0, x.shape.dtype)), b.ceil(x), b.floor(x))


@lowering(aten.trunc.default)
def trunc(ctx: Context, x: Op) -> Op:
    return truncate(ctx, x) if x.shape.dtype.is_float else x


@lowering(aten.relu.default)
def relu(ctx: Context, x: Op) -> Op:
    return ctx.builder.max(*_same(ctx, x, ctx.scalar(0, x.shape.dtype)))


@lowering(aten.hardtanh.default)
def hardtanh(ctx: Context, x: Op, min_val: Number = -1, max_val: Number = 1) -> Op:
    return clamp(ctx, x, ctx.scalar(min_val, x.shape.dtype), ctx.scalar(max_val, x.shape.dtype))


@lowering(aten.leaky_relu.default)
def leaky_relu(ctx: Context, x: Op, negative_slope: Number = 0.01) -> Op:
    b, wide = ctx.builder, ctx.wide(x)
    low = b.mul(wide, _c(ctx, negative_slope, wide))
    return ctx.cast(b.where(b.greater_than(wide, _c(ctx, 0, wide)), wide, low), x.shape.dtype)


@lowering(aten.elu.default)
def elu(ctx: Context, x: Op, alpha: Number = 1, scale: Number = 1, input_scale: Number = 1) -> Op:
    b, wide = ctx.builder, ctx.wide(x)
    low = b.mul(b.expm1(b.mul(wide, _c(ctx, input_scale, wide))), _c(ctx, alpha * scale, wide))
    high = b.mul(wide, _c(ctx, scale, wide))
    return ctx.cast(b.where(b.greater_than(wide, _c(ctx, 0, wide)), high, low), x.shape.dtype)


@lowering(aten.gelu.default)
def gelu(ctx: Context, x: Op, approximate: str = "none") -> Op:
    return ctx.builder.gelu(x, approximate=approximate == "tanh")


def _same(ctx: Context, *ops: Op) -> tuple[Op, ...]:
    """`ops` expanded to their common dimensions."""
    dimensions = ctx.broadcast_dims(*(op.shape.dimensions for op in ops))
    return tuple(ctx.expand(op, dimensions) for op in ops)
