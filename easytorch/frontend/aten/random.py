"""Operations that draw random numbers, from the bits of `Context.random_bits`.

They follow the distribution but are not torch's own numbers, which differ between devices too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from easytorch.backends.builder import Builder
from easytorch.backends.dtypes import DType
from easytorch.backends.graph import Op
from easytorch.backends.shapes import Shape
from easytorch.frontend.context import Context
from easytorch.frontend.errors import LoweringError
from easytorch.frontend.promotion import torch_dtype
from easytorch.frontend.registry import lowering

aten = torch.ops.aten
# Random bits of a uniform number: all that its significand holds, so that 1 is never reached by rounding.
_DIGITS = {DType.FLOAT16: 11, DType.BFLOAT16: 8, DType.FLOAT32: 24, DType.FLOAT64: 53}


def unit(ctx: Context, dimensions: Sequence[int], dtype: DType) -> Op:
    """Uniform in [0, 1), multiples of 2**-digits."""
    if dtype not in _DIGITS:
        raise LoweringError(f"random numbers are drawn as {', '.join(_DIGITS)}, not as {dtype}")
    digits = _DIGITS[dtype]
    source, width = (DType.UINT64, 64) if digits > 32 else (DType.UINT32, 32)
    bits = ctx.random_bits(dimensions, source)
    kept = ctx.builder.shift_right_logical(bits, ctx.scalar(width - digits, source))
    wide = DType.FLOAT64 if digits > 32 else DType.FLOAT32
    number = ctx.builder.mul(ctx.builder.convert_dtype(kept, wide), ctx.scalar(2.0**-digits, wide))
    return ctx.cast(number, dtype)


def _positive(ctx: Context, dimensions: Sequence[int], dtype: DType) -> Op:
    """Uniform in (0, 1]: its logarithm is finite."""
    return ctx.builder.sub(ctx.scalar(1.0, dtype), unit(ctx, dimensions, dtype))


def standard_normal(ctx: Context, dimensions: Sequence[int], dtype: DType) -> Op:
    """Box and Muller 1958, both numbers of each pair; narrow floats are computed in float32.

    A complex number has independent parts of variance 1/2, as torch's.
    """
    b = ctx.builder
    if dtype.is_complex:
        real, imag = (standard_normal(ctx, dimensions, dtype.real) for _ in range(2))
        half = ctx.scalar(math.sqrt(0.5), dtype.real)
        return b.complex(b.mul(real, half), b.mul(imag, half))
    wide = dtype if dtype.size >= 4 else DType.FLOAT32
    size = math.prod(dimensions)
    pairs = (size + 1) // 2
    radius = b.sqrt(b.mul(b.log(_positive(ctx, (pairs,), wide)), ctx.scalar(-2.0, wide)))
    angle = b.mul(unit(ctx, (pairs,), wide), ctx.scalar(2 * math.pi, wide))
    both = b.concatenate(0, b.mul(radius, b.cos(angle)), b.mul(radius, b.sin(angle)))
    return ctx.cast(ctx.reshape(b.slice(both, (0,), (size,)), dimensions), dtype)


def _standard_exponential(ctx: Context, dimensions: Sequence[int], dtype: DType) -> Op:
    """-log(u), at least half an epsilon as torch's: zero would make quotients of it infinite."""
    wide = dtype if dtype.size >= 4 else DType.FLOAT32
    least = ctx.scalar(torch.finfo(torch_dtype(wide)).eps / 2, wide)
    number = ctx.builder.neg(ctx.builder.log(_positive(ctx, dimensions, wide)))
    return ctx.cast(ctx.builder.max(number, least), dtype)


def _affine(ctx: Context, x: Op, scale: Any, offset: Any) -> Op:
    kind = x.shape.dtype
    scaled = ctx.builder.mul(*ctx.operands(x, scale, dtype=kind))
    return ctx.builder.add(*ctx.operands(scaled, offset, dtype=kind))


def integers(ctx: Context, dimensions: Sequence[int], low: int, high: int, dtype: DType) -> Op:
    """Uniform in [low, high): bits modulo the range, as torch's; the bias is at most the range over 2**64."""
    if low >= high:
        raise LoweringError(f"random integers are drawn from low up to below high, and {low} >= {high}")
    bits = ctx.random_bits(dimensions, DType.UINT64)
    b = ctx.builder
    rest = bits if high - low == 2**64 else b.rem(bits, ctx.scalar(high - low, DType.UINT64))
    return ctx.cast(b.add(b.bitcast(rest, DType.INT64), ctx.scalar(low, DType.INT64)), dtype)


# --- uniform


@lowering(aten.rand.default, aten.rand_like.default, aten.rand.generator)
def rand(ctx: Context, size: Op | Sequence[int], **options: Any) -> Op:
    return unit(ctx, _sizes(size), ctx.dtype())


@lowering(aten.uniform.default)
def uniform(ctx: Context, x: Op, low: float = 0.0, high: float = 1.0, **options: Any) -> Op:
    return _affine(ctx, unit(ctx, x.shape.dimensions, x.shape.dtype), high - low, low)


# --- normal


@lowering(aten.randn.default, aten.randn_like.default, aten.randn.generator)
def randn(ctx: Context, size: Op | Sequence[int], **options: Any) -> Op:
    return standard_normal(ctx, _sizes(size), ctx.dtype())


@lowering(aten.normal_functional.default)
def normal_functional(ctx: Context, x: Op, mean: float = 0.0, std: float = 1.0, **options: Any) -> Op:
    return _affine(ctx, standard_normal(ctx, x.shape.dimensions, x.shape.dtype), std, mean)


@lowering(aten.normal.float_float)
def normal_of_size(ctx: Context, mean: float, std: float, size: Sequence[int], **options: Any) -> Op:
    return _affine(ctx, standard_normal(ctx, tuple(size), ctx.dtype()), std, mean)


@lowering(aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor)
def normal(ctx: Context, mean: Op | float = 0.0, std: Op | float = 1.0, **options: Any) -> Op:
    shapes = [value.shape.dimensions for value in (mean, std) if isinstance(value, Op)]
    return _affine(ctx, standard_normal(ctx, ctx.broadcast_dims(*shapes), ctx.dtype()), std, mean)


@lowering(aten.log_normal.default)
def log_normal(ctx: Context, x: Op, mean: float = 1.0, std: float = 2.0, **options: Any) -> Op:
    return ctx.builder.exp(_affine(ctx, standard_normal(ctx, x.shape.dimensions, x.shape.dtype), std, mean))


# --- other distributions


@lowering(aten.exponential.default)
def exponential(ctx: Context, x: Op, lambd: float = 1.0, **options: Any) -> Op:
    number = _standard_exponential(ctx, x.shape.dimensions, x.shape.dtype)
    return ctx.builder.div(number, ctx.scalar(lambd, x.shape.dtype))


@lowering(aten.cauchy.default)
def cauchy(ctx: Context, x: Op, median: float = 0.0, sigma: float = 1.0, **options: Any) -> Op:
    wide = x.shape.dtype if x.shape.dtype.size >= 4 else DType.FLOAT32
    turn = ctx.builder.sub(unit(ctx, x.shape.dimensions, wide), ctx.scalar(0.5, wide))
    angle = ctx.builder.mul(turn, ctx.scalar(math.pi, wide))
    tangent = ctx.builder.div(ctx.builder.sin(angle), ctx.builder.cos(angle))
    return ctx.cast(_affine(ctx, tangent, sigma, median), x.shape.dtype)


@lowering(aten.geometric.default)
def geometric(ctx: Context, x: Op, p: float, **options: Any) -> Op:
    """Trials up to the first success: ceil(log(u) / log(1 - p)), at least one."""
    wide = x.shape.dtype if x.shape.dtype is DType.FLOAT64 else DType.FLOAT32
    if p == 1:
        return ctx.full(x.shape.dimensions, 1, x.shape.dtype)
    logarithm = ctx.builder.log(_positive(ctx, x.shape.dimensions, wide))
    trials = ctx.builder.ceil(ctx.builder.div(logarithm, ctx.scalar(math.log1p(-p), wide)))
    return ctx.cast(ctx.builder.max(trials, ctx.scalar(1.0, wide)), x.shape.dtype)


@lowering(aten.bernoulli.default, aten.bernoulli.p, aten.bernoulli.Tensor)
def bernoulli(ctx: Context, x: Op, p: Op | float | None = None, **options: Any) -> Op:
    """One with the probability p, by default that of the element; of x's shape and type."""
    chance = x if p is None else p
    wide = chance.shape.dtype if isinstance(chance, Op) and chance.shape.dtype is DType.FLOAT64 else DType.FLOAT32
    return ctx.cast(_chance(ctx, x.shape.dimensions, chance, wide), x.shape.dtype)


def _chance(ctx: Context, dimensions: Sequence[int], p: Op | float, wide: DType) -> Op:
    """bool: true with probability p, exactly never and always at 0 and 1."""
    return ctx.builder.less_than(*ctx.operands(unit(ctx, dimensions, wide), p, dtype=wide))


# --- dropout


@lowering(aten.native_dropout.default)
def native_dropout(ctx: Context, x: Op, p: float, train: bool | None) -> tuple[Op, Op]:
    """x / (1 - p) where the mask keeps, 0 elsewhere; and the mask (bool)."""
    dimensions, kind = x.shape.dimensions, x.shape.dtype
    if train is False or p == 0:
        return x, ctx.full(dimensions, True, DType.BOOL)
    if p == 1:
        return ctx.full(dimensions, 0, kind), ctx.full(dimensions, False, DType.BOOL)
    mask = _chance(ctx, dimensions, 1 - p, DType.FLOAT32)
    scaled = ctx.builder.mul(x, ctx.scalar(1 / (1 - p), kind))
    return ctx.builder.where(mask, scaled, ctx.scalar(0, kind)), mask


@lowering(aten.dropout.default)
def dropout(ctx: Context, x: Op, p: float, train: bool) -> Op:
    return native_dropout(ctx, x, p, train)[0]


@lowering(aten.rrelu_with_noise_functional.default)
def rrelu_with_noise_functional(
    ctx: Context,
    x: Op,
    noise: Op,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    generator: None = None,
) -> tuple[Op, Op]:
    """Leaky ReLU, its slope uniform in [lower, upper) when training, and the slopes (1 where x > 0)."""
    kind, b = x.shape.dtype, ctx.builder
    negative = b.less_or_equal(x, ctx.scalar(0, kind))
    if not training:
        return b.where(negative, b.mul(x, ctx.scalar((lower + upper) / 2, kind)), x), noise
    slope = _affine(ctx, unit(ctx, x.shape.dimensions, kind), upper - lower, lower)
    slope = b.where(negative, slope, ctx.scalar(1, kind))
    return b.mul(x, slope), slope


# --- integers


@lowering(aten.randint.default, aten.randint.generator)
def randint(ctx: Context, high: int, size: Sequence[int], **options: Any) -> Op:
    return integers(ctx, tuple(size), 0, high, ctx.dtype())


@lowering(aten.randint.low, aten.randint.low_generator)
def randint_low(ctx: Context, low: int, high: int, size: Sequence[int], **options: Any) -> Op:
    return integers(ctx, tuple(size), low, high, ctx.dtype())


@lowering(aten.randint_like.default)
def randint_like(ctx: Context, x: Op, high: int, **options: Any) -> Op:
    return integers(ctx, x.shape.dimensions, 0, high, ctx.dtype())


@lowering(aten.randint_like.low_dtype)
def randint_like_low(ctx: Context, x: Op, low: int, high: int, **options: Any) -> Op:
    return integers(ctx, x.shape.dimensions, low, high, ctx.dtype())


@lowering(aten.random.default)
def random(ctx: Context, x: Op, **options: Any) -> Op:
    """All non-negative integers of the type; of a float, those it holds exactly."""
    kind = x.shape.dtype
    high = (
        2 ** _DIGITS[kind] + 1 if kind.is_float else 2 if kind is DType.BOOL else torch.iinfo(torch_dtype(kind)).max + 1
    )
    return integers(ctx, x.shape.dimensions, 0, high, kind)


@lowering(aten.random.to)
def random_to(ctx: Context, x: Op, to: int, **options: Any) -> Op:
    return integers(ctx, x.shape.dimensions, 0, to, x.shape.dtype)


@lowering(getattr(aten.random, "from"))
def random_from(ctx: Context, x: Op, low: int, to: int | None, **options: Any) -> Op:
    high = torch.iinfo(torch_dtype(x.shape.dtype)).max + 1 if to is None else to
    return integers(ctx, x.shape.dimensions, low, high, x.shape.dtype)


# --- permutations and samples


@lowering(aten.randperm.default, aten.randperm.generator)
def randperm(ctx: Context, count: int, **options: Any) -> Op:
    """The numbers below `count`, in the order of random 64-bit keys."""
    places = ctx.builder.iota(Shape(DType.INT64, (count,)), 0)
    _, order = ctx.builder.sort(_first_is_less, 0, True, ctx.random_bits((count,), DType.UINT64), places)
    return ctx.cast(order, ctx.dtype())


def _first_is_less(builder: Builder, first: Op, second: Op, *rest: Op) -> Op:
    return builder.less_than(first, second)


def _first_is_greater(builder: Builder, first: Op, second: Op, *rest: Op) -> Op:
    return builder.greater_than(first, second)


@lowering(aten.multinomial.default)
def multinomial(ctx: Context, x: Op, num_samples: int, replacement: bool = False, **options: Any) -> Op:
    """Indices drawn by the weights x (..., n): the first in a race of exponential clocks, E_i / x_i (Efraimidis and
    Spirakis 2006); without replacement one race gives all samples, with it each has its own."""
    b, wide = ctx.builder, ctx.wide(x)
    kind, rows, count = wide.shape.dtype, x.shape.dimensions[:-1], x.shape.dimensions[-1]
    dimensions = (*rows, num_samples, count) if replacement else (*rows, 1, count)
    weights = ctx.expand(ctx.reshape(wide, (*rows, 1, count)), dimensions)
    speed = b.div(weights, _standard_exponential(ctx, dimensions, kind))
    axis = len(dimensions) - 1
    if replacement:
        return b.arg_min_max(speed, axis, DType.INT64, False)
    places = ctx.iota(dimensions, axis, DType.INT64)
    _, order = b.sort(_first_is_greater, axis, True, speed, places)
    taken = b.slice(order, (0,) * len(dimensions), (*dimensions[:-1], num_samples))
    return ctx.reshape(taken, (*rows, num_samples))


def _sizes(given: Op | Sequence[int]) -> tuple[int, ...]:
    return given.shape.dimensions if isinstance(given, Op) else tuple(given)
