"""Elementwise operations."""

from __future__ import annotations

import math
from collections.abc import Callable

from easytorch.backends.dtypes import SIGNED, DType
from easytorch.backends.partitioning import Sharding
from easytorch.backends.types import OpType
from easytorch.backends.xla.emitter import Emitter, Value, sdy_sharding
from easytorch.backends.xla.narrow import narrow, widen, widened
from easytorch.backends.xla.ops import Emit

Unary = Callable[[Emitter, Value], Value]
Binary = Callable[[Emitter, Value, Value], Value]


def _one(name: str) -> Unary:
    return widened(lambda e, x: e.unary(name, x))


def _analytic(name: str) -> Unary:
    """Computes bfloat16 and float16 in float32: some of XLA's own expansions round at every step."""
    return widened(lambda e, x: e.unary(name, x), least=4)


def _extreme(name: str, direction: str) -> Binary:
    def emit(e: Emitter, x0: Value, x1: Value) -> Value:
        x0, x1 = e.together(x0, x1)
        if not x0.dtype.is_complex:
            return e.binary(name, x0, x1)
        # Ordered by real part, then imaginary part; NaN where either operand has one.
        (r0, r1), (i0, i1) = ([part(e, x) for x in (x0, x1)] for part in (_real, _imag))
        ahead = e.binary("and", e.compare("EQ", r0, r1), e.unary("not", e.compare(direction, i1, i0)))
        first = e.binary("or", e.compare(direction, r0, r1), ahead)
        nan0, nan1 = (e.compare("NE", x, x) for x in (x0, x1))
        second = e.binary("and", nan1, e.unary("not", nan0))
        return e.select(e.binary("and", e.binary("or", first, nan0), e.unary("not", second)), x0, x1)

    return widened(emit)


def _two(name: str) -> Binary:
    return widened(lambda e, x0, x1: e.binary(name, *e.together(x0, x1)))


def _precise(name: str) -> Binary:
    return widened(lambda e, x0, x1: e.binary(name, *e.together(x0, x1)), least=4)


def _comparison(direction: str) -> Binary:
    def emit(e: Emitter, x0: Value, x1: Value) -> Value:
        x0, x1 = e.together(widen(e, x0), widen(e, x1))
        return e.compare(direction, x0, x1)

    return emit


def _total_order(direction: str) -> Binary:
    def emit(e: Emitter, x0: Value, x1: Value) -> Value:
        x0, x1 = e.together(x0, x1)
        if x0.dtype in (DType.FLOAT32, DType.FLOAT64):
            return e.compare(direction, x0, x1, kind="TOTALORDER")
        return e.compare(direction, _ordinals(e, x0), _ordinals(e, x1))

    return emit


def _ordinals(e: Emitter, x: Value) -> Value:
    """Integers that sort as the total order of narrow floats, whose NaNs would lose their bits in a wider type."""
    dtype = DType.INT8 if x.dtype.size == 1 else DType.INT16
    bits = e.bits(x, x.shape.with_dtype(dtype))
    turned = e.binary("xor", bits, e.like(bits, 2 ** (dtype.bits - 1) - 1))
    return e.select(e.compare("LT", bits, e.like(bits, 0)), turned, bits)


def _sqrt(e: Emitter, x: Value) -> Value:
    root = e.unary("sqrt", x)
    if not x.dtype.is_complex:
        return root
    # The imaginary part takes the sign of x's, also for a signed zero, which XLA ignores.
    imaginary = e.unary("abs", _imag(e, root))
    bits = DType.INT32 if x.dtype is DType.COMPLEX64 else DType.INT64
    signs = e.bits(_imag(e, x), x.shape.with_dtype(bits))
    below = e.compare("LT", signs, e.like(signs, 0))
    return _complex(e, _real(e, root), e.select(below, e.unary("negate", imaginary), imaginary))


def _rsqrt(e: Emitter, x: Value) -> Value:
    if not x.dtype.is_complex:
        return e.unary("rsqrt", x)
    return e.binary("divide", e.like(x, 1), _sqrt(e, x))


def _pow(e: Emitter, x0: Value, x1: Value) -> Value:
    if not x0.dtype.is_integer:
        return _complex_power(e, *e.together(x0, x1)) if x0.dtype.is_complex else e.binary("power", *e.together(x0, x1))
    base, exponent = e.together(x0, x1)
    zero, one = e.like(base, 0), e.like(base, 1)
    signed = x0.dtype in SIGNED
    magnitude = e.binary("maximum", exponent, zero) if signed else exponent
    power = _integer_power(e, base, magnitude)
    if not signed:
        return power
    # 1 / x**n is an integer only for x = 1 and x = -1; for x = 0 all bits are set, as in a division by zero.
    minus = e.like(base, -1)
    even = e.compare("EQ", e.binary("and", exponent, one), zero)
    of_minus = e.select(e.compare("EQ", base, minus), e.select(even, one, minus), zero)
    inverse = e.select(e.compare("EQ", base, zero), minus, e.select(e.compare("EQ", base, one), one, of_minus))
    return e.select(e.compare("LT", exponent, zero), inverse, power)


def _complex_power(e: Emitter, base: Value, exponent: Value) -> Value:
    """Zero is handled apart: XLA would take its logarithm."""
    zero = e.like(base, 0)
    part = _real(e, exponent)
    vanishes = e.binary("and", e.compare("EQ", base, zero), e.compare("GT", part, e.like(part, 0)))
    return e.select(vanishes, zero, e.binary("power", base, exponent))


def _integer_power(e: Emitter, base: Value, exponent: Value) -> Value:
    """By repeated squaring, modulo 2**bits: XLA's own reads only the lowest bits of the exponent."""
    zero, one = e.like(base, 0), e.like(base, 1)

    def unfinished(_base: Value, exponent: Value, _power: Value) -> list[Value]:
        return [e.reduce("or", e.compare("NE", exponent, zero), 0, range(exponent.rank))]

    def step(base: Value, exponent: Value, power: Value) -> list[Value]:
        odd = e.compare("NE", e.binary("and", exponent, one), zero)
        multiplied = e.select(odd, e.binary("multiply", power, base), power)
        return [e.binary("multiply", base, base), e.binary("shift_right_logical", exponent, one), multiplied]

    shapes = [base.shape] * 3
    regions = f"{e.region(shapes, unfinished)}, {e.region(shapes, step)}"
    return e.ops("while", (base, exponent, one), shapes, "", regions)[2]


def _abs(e: Emitter, x: Value) -> Value:
    size = e.op("abs", (x,), x.shape.with_dtype(x.dtype.real))
    if not x.dtype.is_complex:
        return size
    # Infinite where either part is, as in C; XLA returns NaN if the other part is NaN.
    infinity = e.like(size, math.inf)
    parts = [e.compare("EQ", e.unary("abs", part), infinity) for part in (_real(e, x), _imag(e, x))]
    return e.select(e.binary("or", *parts), infinity, size)


def _sign(e: Emitter, x: Value) -> Value:
    if not x.dtype.is_complex:
        return e.unary("sign", x)
    # Divided by the larger part first: the modulus of the smallest and largest numbers underflows or overflows.
    real, imaginary = _real(e, x), _imag(e, x)
    large = e.binary("maximum", e.unary("abs", real), e.unary("abs", imaginary))
    none, one = e.compare("EQ", large, e.like(large, 0)), e.like(large, 1)
    scale = e.select(none, one, large)
    parts = [e.binary("divide", part, scale) for part in (real, imaginary)]
    squares = [e.binary("multiply", part, part) for part in parts]
    # Multiplied by the inverse: XLA merges two divisions into one by the product, which overflows.
    inverse = e.unary("rsqrt", e.select(none, one, e.binary("add", *squares)))
    found = [
        e.select(none, part, e.binary("multiply", scaled, inverse))
        for part, scaled in zip((real, imaginary), parts, strict=True)
    ]
    return _complex(e, *found)


def _sine(e: Emitter, x: Value) -> Value:
    return _by_hyperbolic(e, x, "sine", "cosine") if x.dtype.is_complex else e.unary("sine", x)


def _cosine(e: Emitter, x: Value) -> Value:
    return _by_hyperbolic(e, x, "cosine", "sine") if x.dtype.is_complex else e.unary("cosine", x)


def _by_hyperbolic(e: Emitter, x: Value, name: str, other: str) -> Value:
    """name(a) cosh b + i other(a) sinh b (minus for the cosine): XLA's own loses small imaginary parts."""
    a, b = _real(e, x), _imag(e, x)
    half, zero = e.like(b, 0.5), e.like(b, 0)
    size = e.unary("abs", b)
    less = e.unary("exponential_minus_one", size)
    # sinh b = (u + u / (u + 1)) / 2 with u = e^b - 1, accurate near zero.
    small = e.binary("add", less, e.binary("divide", less, e.binary("add", less, e.like(b, 1))))
    up, down = e.unary("exponential", size), e.unary("exponential", e.unary("negate", size))
    near = e.compare("LT", size, e.like(b, 1))
    sinh = e.select(near, small, e.binary("subtract", up, down))
    cosh = e.binary("add", up, down)
    # Twice them is e^b from 40 on, which is multiplied in as two roots: it may be infinite where the product is not.
    far, root = e.compare("GT", size, e.like(b, 40)), e.unary("exponential", e.binary("multiply", half, size))

    def times(factor: Value, twice: Value) -> Value:
        first = e.binary("multiply", e.binary("multiply", half, factor), e.select(far, root, twice))
        return e.binary("multiply", first, e.select(far, root, e.like(b, 1)))

    turned = e.unary(other, a)
    below = e.compare("LT", b, zero)
    minus = e.unary("not", below) if name == "cosine" else below
    imaginary = times(e.select(minus, e.unary("negate", turned), turned), sinh)
    # 0 * inf occurs where a or b is 0; in the real part of a sine where a is.
    vanishes = e.binary("or", e.compare("EQ", turned, zero), e.compare("EQ", b, zero))
    first = e.unary(name, a)
    real = e.select(e.compare("EQ", first, zero), first, times(first, cosh))
    return _complex(e, real, e.select(vanishes, zero, imaginary))


def _tan(e: Emitter, x: Value) -> Value:
    """tan x; of complex numbers -i tanh(i x)."""
    if not x.dtype.is_complex:
        return e.unary("tan", x)
    turned = e.unary("tanh", _complex(e, e.unary("negate", _imag(e, x)), _real(e, x)))
    return _complex(e, _imag(e, turned), e.unary("negate", _real(e, turned)))


def _cbrt(e: Emitter, x: Value) -> Value:
    if not x.dtype.is_complex:
        return e.unary("cbrt", x)
    # By modulus and angle: the logarithm of a large number has few digits after the point. Large numbers are divided
    # by eight, so that the modulus does not overflow.
    real, imaginary = _real(e, x), _imag(e, x)
    large = e.compare(
        "GT", e.binary("maximum", e.unary("abs", real), e.unary("abs", imaginary)), one := e.like(real, 1)
    )
    scale = e.select(large, e.like(real, 0.125), one)
    scaled = _complex(e, e.binary("multiply", real, scale), e.binary("multiply", imaginary, scale))
    size = e.binary("multiply", e.unary("cbrt", _abs(e, scaled)), e.select(large, e.like(real, 2), one))
    angle = e.binary("divide", e.binary("atan2", imaginary, real), e.like(real, 3))
    return _complex(e, *(e.binary("multiply", size, e.unary(name, angle)) for name in ("cosine", "sine")))


def _expm1(e: Emitter, x: Value) -> Value:
    """For complex numbers e^a cos b - 1 without subtracting nearly equal numbers."""
    if not x.dtype.is_complex:
        return e.unary("exponential_minus_one", x)
    a, b = _real(e, x), _imag(e, x)
    half, zero = e.like(a, 0.5), e.like(a, 0)
    cosine, sine = e.unary("cosine", b), e.unary("sine", b)
    less, turn = e.unary("exponential_minus_one", a), e.unary("sine", e.binary("multiply", half, b))
    squared = e.binary("multiply", e.like(a, 2), e.binary("multiply", turn, turn))
    real = e.binary("subtract", e.binary("multiply", less, cosine), squared)
    imaginary = e.binary("multiply", e.unary("exponential", a), sine)
    # e^a alone may be infinite where e^a cos b is not; from 40 on the 1 is below the last digit.
    far, root = e.compare("GT", a, e.like(a, 40)), e.unary("exponential", e.binary("multiply", half, a))
    real, imaginary = (
        e.select(far, e.binary("multiply", e.binary("multiply", root, factor), root), near)
        for factor, near in ((cosine, real), (sine, imaginary))
    )
    flat = e.compare("EQ", b, zero)
    return _complex(e, e.select(flat, less, real), e.select(flat, b, imaginary))


def _atan2(e: Emitter, x0: Value, x1: Value) -> Value:
    """For complex numbers -i log((x1 + i x0) / sqrt(x1^2 + x0^2)), both divided by their largest part first, as squares
    of the smallest and largest numbers underflow or overflow."""
    x0, x1 = e.together(x0, x1)
    if not x0.dtype.is_complex:
        return e.binary("atan2", x0, x1)
    sizes = [e.unary("abs", part) for x in (x0, x1) for part in (_real(e, x), _imag(e, x))]
    large = e.binary("maximum", e.binary("maximum", *sizes[:2]), e.binary("maximum", *sizes[2:]))
    zero, one, infinite = (e.like(large, number) for number in (0, 1, float("inf")))
    scale = e.select(e.compare("GT", large, zero), e.select(e.compare("LT", large, infinite), large, one), one)
    x0, x1 = (
        _complex(e, e.binary("divide", _real(e, x), scale), e.binary("divide", _imag(e, x), scale)) for x in (x0, x1)
    )
    point = e.binary("add", x1, _complex(e, e.unary("negate", _imag(e, x0)), _real(e, x0)))
    squares = e.binary("add", e.binary("multiply", x1, x1), e.binary("multiply", x0, x0))
    turn = e.unary("log", e.binary("divide", point, e.unary("sqrt", squares)))
    return _complex(e, _imag(e, turn), e.unary("negate", _real(e, turn)))


def _reduce_precision(e: Emitter, x: Value, exponent_bits: int, mantissa_bits: int) -> Value:
    sizes = {DType.FLOAT16: (5, 10), DType.BFLOAT16: (8, 7), DType.FLOAT32: (8, 23), DType.FLOAT64: (11, 52)}
    exponent, mantissa = (min(*pair) for pair in zip(sizes[x.dtype], (exponent_bits, mantissa_bits), strict=True))
    attributes = f"exponent_bits = {exponent} : i32, mantissa_bits = {mantissa} : i32"
    found = e.op("reduce_precision", (x,), x.shape, attributes)
    # With 0 mantissa bits XLA turns NaN into infinity.
    return e.select(e.compare("NE", x, x), x, found)


def _real_log_plus_one(e: Emitter, x: Value) -> Value:
    """XLA's own is good to 120 roundings of float64 below sqrt(1/2) - 1, where the sum with 1 is good to one."""
    summed = e.unary("log", e.binary("add", x, e.like(x, 1)))
    return e.select(e.compare("LT", x, e.like(x, -0.25)), summed, e.unary("log_plus_one", x))


def _log_plus_one(e: Emitter, x: Value) -> Value:
    """For complex numbers log |1 + x| without squares that overflow or underflow, as in XLA's own."""
    if not x.dtype.is_complex:
        return _real_log_plus_one(e, x)
    real, imaginary = _real(e, x), _imag(e, x)
    shifted = e.binary("add", real, e.like(real, 1))
    sizes = e.unary("abs", shifted), e.unary("abs", imaginary)
    large, small = e.binary("maximum", *sizes), e.binary("minimum", *sizes)
    zero, one, half = (e.like(real, number) for number in (0, 1, 0.5))
    none = e.compare("EQ", large, zero)
    ratio = e.binary("divide", small, e.select(none, one, large))
    rest = e.binary("multiply", half, _real_log_plus_one(e, e.binary("multiply", ratio, ratio)))
    far = e.binary("add", e.unary("log", large), rest)
    infinity = e.like(real, math.inf)
    is_infinite = [e.compare("EQ", e.unary("abs", part), infinity) for part in (real, imaginary)]
    far = e.select(e.binary("or", *is_infinite), infinity, far)
    near = e.binary("and", *(e.compare("LT", e.unary("abs", part), e.like(real, 0.35)) for part in (real, imaginary)))
    product = e.binary("multiply", real, e.binary("add", real, e.like(real, 2)))
    square = e.binary("add", product, e.binary("multiply", imaginary, imaginary))
    close = e.binary("multiply", half, _real_log_plus_one(e, e.select(near, square, zero)))
    return _complex(e, e.select(near, close, far), e.binary("atan2", imaginary, shifted))


def _logistic(e: Emitter, x: Value) -> Value:
    if not x.dtype.is_complex:
        return e.unary("logistic", x)
    # By the power that does not overflow.
    one, part = e.like(x, 1), _real(e, x)
    positive = e.compare("GE", part, e.like(part, 0))
    small = e.unary("exponential", e.select(positive, e.unary("negate", x), x))
    return e.binary("divide", e.select(positive, one, small), e.binary("add", one, small))


def _real(e: Emitter, x: Value) -> Value:
    return e.op("real", (x,), x.shape.with_dtype(x.dtype.real)) if x.dtype.is_complex else x


def _imag(e: Emitter, x: Value) -> Value:
    return e.op("imag", (x,), x.shape.with_dtype(x.dtype.real)) if x.dtype.is_complex else e.like(x, 0)


def _complex(e: Emitter, x0: Value, x1: Value) -> Value:
    x0, x1 = e.together(x0, x1)
    return e.op("complex", (x0, x1), x0.shape.with_dtype(x0.dtype.complex))


def _conj(e: Emitter, x: Value) -> Value:
    return _complex(e, _real(e, x), e.unary("negate", _imag(e, x)))


def _identity(
    e: Emitter, *xs: Value, sharding: Sharding | None = None, barrier: bool = False
) -> Value | tuple[Value, ...]:
    if barrier:
        return e.ops("optimization_barrier", xs, [x.shape for x in xs])
    if sharding is not None:
        return e.op("sdy.sharding_constraint", xs, xs[0].shape, f"sharding = {sdy_sharding(sharding)}")
    return xs[0]


def _is_finite(e: Emitter, x: Value) -> Value:
    wide = widen(e, x)
    return e.op("is_finite", (wide,), x.shape.with_dtype(DType.BOOL))


def _is_nan(e: Emitter, x: Value) -> Value:
    wide = widen(e, x)
    return e.compare("NE", wide, wide)


def _shift(name: str) -> Binary:
    def emit(e: Emitter, x0: Value, x1: Value) -> Value:
        return e.binary(name, *e.together(x0, x1))

    return emit


def _shift_right_arithmetic(e: Emitter, x0: Value, x1: Value) -> Value:
    if x0.dtype is not DType.UINT4:
        return widened(_shift("shift_right_arithmetic"))(e, x0, x1)
    # The highest of the four bits is shifted in, as for wider unsigned integers.
    signed = _sign_extended(e, e.convert(widen(e, x0), DType.INT8))
    shifted = e.binary("shift_right_arithmetic", *e.together(signed, e.convert(widen(e, x1), DType.INT8)))
    return narrow(e, e.convert(shifted, DType.UINT8), DType.UINT4)


def _shift_right_logical(e: Emitter, x0: Value, x1: Value) -> Value:
    if x0.dtype is not DType.INT4:
        return widened(_shift("shift_right_logical"))(e, x0, x1)
    byte, amount = e.together(_nibble(e, x0), e.convert(e.convert(x1, DType.INT8), DType.UINT8))
    shifted = e.convert(e.binary("shift_right_logical", byte, amount), DType.INT8)
    return e.convert(_sign_extended(e, shifted), DType.INT4)


def _sign_extended(e: Emitter, x: Value) -> Value:
    four = e.like(x, 4)
    return e.binary("shift_right_arithmetic", e.binary("shift_left", x, four), four)


def _nibble(e: Emitter, x: Value) -> Value:
    """The four bits of int4 or uint4 in a byte whose high bits are zero."""
    byte = e.convert(widen(e, x), DType.UINT8)
    return e.binary("and", byte, e.like(byte, 15))


def _bit_count(e: Emitter, x: Value) -> Value:
    if x.dtype.bits > 4:
        return e.unary("popcnt", x)
    return _from_byte(e, e.unary("popcnt", _nibble(e, x)), x.dtype)


def _clz(e: Emitter, x: Value) -> Value:
    if x.dtype.bits > 4:
        return e.unary("count_leading_zeros", x)
    counted = e.unary("count_leading_zeros", _nibble(e, x))
    return _from_byte(e, e.binary("subtract", counted, e.like(counted, 4)), x.dtype)


def _from_byte(e: Emitter, x: Value, dtype: DType) -> Value:
    """Counts up to 4 as `dtype`."""
    return e.convert(e.convert(x, DType.INT8), dtype) if dtype is DType.INT4 else e.convert(x, dtype)


def _erf(e: Emitter, x: Value) -> Value:
    return e.unary("chlo.erf", x)


def _clamp(e: Emitter, least: Value, x: Value, most: Value) -> Value:
    least, x, most = e.together(least, x, most)
    return e.binary("minimum", e.binary("maximum", x, least), most)


def _where(e: Emitter, condition: Value, on_true: Value, on_false: Value) -> Value:
    return e.select(*e.together(condition, on_true, on_false))


_COMPARISONS = {
    "EQ": (OpType.EQUAL, OpType.EQUAL_TOTAL_ORDER),
    "NE": (OpType.NOT_EQUAL, OpType.NOT_EQUAL_TOTAL_ORDER),
    "LT": (OpType.LESS_THAN, OpType.LESS_THAN_TOTAL_ORDER),
    "LE": (OpType.LESS_OR_EQUAL, OpType.LESS_OR_EQUAL_TOTAL_ORDER),
    "GT": (OpType.GREATER_THAN, OpType.GREATER_THAN_TOTAL_ORDER),
    "GE": (OpType.GREATER_OR_EQUAL, OpType.GREATER_OR_EQUAL_TOTAL_ORDER),
}

EMITTERS: dict[OpType, Emit] = {
    OpType.IDENTITY: _identity,
    OpType.ABS: widened(_abs),
    OpType.NEG: _one("negate"),
    OpType.SIGN: widened(_sign),
    OpType.CEIL: _one("ceil"),
    OpType.FLOOR: _one("floor"),
    OpType.ROUND: _one("round_nearest_even"),
    OpType.ERF: widened(_erf, least=4),
    OpType.COS: widened(_cosine, least=4),
    OpType.SIN: widened(_sine, least=4),
    OpType.EXP: _analytic("exponential"),
    OpType.EXPM1: widened(_expm1, least=4),
    OpType.LOG: _analytic("log"),
    OpType.LOG1P: widened(_log_plus_one, least=4),
    OpType.LOGISTIC: widened(_logistic, least=4),
    OpType.RSQRT: widened(_rsqrt, least=4),
    OpType.SQRT: widened(_sqrt, least=4),
    OpType.TANH: _analytic("tanh"),
    OpType.TAN: widened(_tan, least=4),
    OpType.CBRT: widened(_cbrt, least=4),
    OpType.ROUND_NEAREST_AFZ: _one("round_nearest_afz"),
    OpType.REDUCE_PRECISION: _reduce_precision,
    OpType.REAL: _real,
    OpType.IMAG: _imag,
    OpType.CONJ: _conj,
    OpType.COMPLEX: _complex,
    OpType.IS_FINITE: _is_finite,
    OpType.IS_NAN: _is_nan,
    OpType.LOGICAL_NOT: _one("not"),
    OpType.BITWISE_NOT: _one("not"),
    OpType.BIT_COUNT: _bit_count,
    OpType.CLZ: _clz,
    OpType.ADD: _two("add"),
    OpType.SUB: _two("subtract"),
    OpType.MUL: _two("multiply"),
    OpType.DIV: _two("divide"),
    OpType.REM: _precise("remainder"),
    OpType.POW: widened(_pow, least=4),
    OpType.MAX: _extreme("maximum", "GT"),
    OpType.MIN: _extreme("minimum", "LT"),
    OpType.ATAN2: widened(_atan2, least=4),
    OpType.BITWISE_AND: _two("and"),
    OpType.BITWISE_OR: _two("or"),
    OpType.BITWISE_XOR: _two("xor"),
    OpType.LOGICAL_AND: _two("and"),
    OpType.LOGICAL_OR: _two("or"),
    OpType.LOGICAL_XOR: _two("xor"),
    OpType.SHIFT_LEFT: widened(_shift("shift_left")),
    OpType.SHIFT_RIGHT_ARITHMETIC: _shift_right_arithmetic,
    OpType.SHIFT_RIGHT_LOGICAL: _shift_right_logical,
    OpType.CLAMP: widened(_clamp),
    OpType.WHERE: _where,
    **{pair[0]: _comparison(direction) for direction, pair in _COMPARISONS.items()},
    **{pair[1]: _total_order(direction) for direction, pair in _COMPARISONS.items()},
}
