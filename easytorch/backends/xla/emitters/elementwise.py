"""Operations on elements."""

from __future__ import annotations

from collections.abc import Callable

from easytorch.backends.dtypes import COMPLEX, FLOATS, SIGNED, UNSIGNED, DType
from easytorch.backends.types import OpType
from easytorch.backends.xla.emitter import Emitter, Value
from easytorch.backends.xla.emitters import ALL, BITS, BOOL, FLOATING, INTEGERS, NUMBERS, ORDERED, Rule, rule
from easytorch.backends.xla.emitters.narrow import widen, widened

Unary = Callable[[Emitter, Value], Value]
Binary = Callable[[Emitter, Value, Value], Value]


def _one(name: str) -> Unary:
    return widened(lambda e, x: e.unary(name, x))


def _analytic(name: str) -> Unary:
    """Of bfloat16 and float16 too in float32: some of XLA's own expansions round every step."""
    return widened(lambda e, x: e.unary(name, x), least=4)


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
    """Integers in the total order of narrow floats, whose NaNs would lose their bits in a wider type."""
    dtype = DType.INT8 if x.dtype.size == 1 else DType.INT16
    bits = e.bits(x, x.shape.with_dtype(dtype))
    turned = e.binary("xor", bits, e.like(bits, 2 ** (dtype.bits - 1) - 1))
    return e.select(e.compare("LT", bits, e.like(bits, 0)), turned, bits)


def _abs(e: Emitter, x: Value) -> Value:
    return e.op("abs", (x,), x.shape.with_dtype(x.dtype.real))


def _logistic(e: Emitter, x: Value) -> Value:
    if not x.dtype.is_complex:
        return e.unary("logistic", x)
    one = e.like(x, 1)
    return e.binary("divide", one, e.binary("add", one, e.unary("exponential", e.unary("negate", x))))


def _real(e: Emitter, x: Value) -> Value:
    return e.op("real", (x,), x.shape.with_dtype(x.dtype.real)) if x.dtype.is_complex else x


def _imag(e: Emitter, x: Value) -> Value:
    return e.op("imag", (x,), x.shape.with_dtype(x.dtype.real)) if x.dtype.is_complex else e.like(x, 0)


def _complex(e: Emitter, x0: Value, x1: Value) -> Value:
    x0, x1 = e.together(x0, x1)
    return e.op("complex", (x0, x1), x0.shape.with_dtype(x0.dtype.complex))


def _conj(e: Emitter, x: Value) -> Value:
    return _complex(e, _real(e, x), e.unary("negate", _imag(e, x)))


def _is_finite(e: Emitter, x: Value) -> Value:
    wide = widen(e, x)
    return e.op("is_finite", (wide,), x.shape.with_dtype(DType.BOOL))


def _is_nan(e: Emitter, x: Value) -> Value:
    wide = widen(e, x)
    return e.compare("NE", wide, wide)


def _shift(name: str) -> Binary:
    def emit(e: Emitter, x0: Value, x1: Value) -> Value:
        # Nothing to fill up with: an unsigned number has no sign, its highest bit is a value.
        plain = name == "shift_right_arithmetic" and x0.dtype in UNSIGNED
        return e.binary("shift_right_logical" if plain else name, *e.together(x0, x1))

    return emit


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
    """The four bits of int4 or uint4 in a byte whose others are zero."""
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

EMITTERS: dict[OpType, Rule] = {
    OpType.IDENTITY: rule(lambda e, x: x, *ALL),
    OpType.ABS: rule(widened(_abs), *SIGNED, *FLOATING),
    OpType.NEG: rule(_one("negate"), *NUMBERS),
    OpType.SIGN: rule(_one("sign"), *SIGNED, *FLOATING),
    OpType.CEIL: rule(_one("ceil"), *FLOATS),
    OpType.FLOOR: rule(_one("floor"), *FLOATS),
    OpType.ROUND: rule(_one("round_nearest_even"), *FLOATS),
    OpType.ERF: rule(widened(_erf, least=4), *FLOATS),
    OpType.COS: rule(_analytic("cosine"), *FLOATING),
    OpType.SIN: rule(_analytic("sine"), *FLOATING),
    OpType.EXP: rule(_analytic("exponential"), *FLOATING),
    OpType.EXPM1: rule(_analytic("exponential_minus_one"), *FLOATING),
    OpType.LOG: rule(_analytic("log"), *FLOATING),
    OpType.LOG1P: rule(_analytic("log_plus_one"), *FLOATING),
    OpType.LOGISTIC: rule(widened(_logistic, least=4), *FLOATING),
    OpType.RSQRT: rule(_analytic("rsqrt"), *FLOATING),
    OpType.SQRT: rule(_analytic("sqrt"), *FLOATING),
    OpType.TANH: rule(_analytic("tanh"), *FLOATING),
    OpType.REAL: rule(_real, *FLOATING),
    OpType.IMAG: rule(_imag, *FLOATING),
    OpType.CONJ: rule(_conj, *COMPLEX),
    OpType.COMPLEX: rule(_complex, DType.FLOAT32, DType.FLOAT64),
    OpType.IS_FINITE: rule(_is_finite, *FLOATS),
    OpType.IS_NAN: rule(_is_nan, *FLOATS),
    OpType.LOGICAL_NOT: rule(_one("not"), *BOOL),
    OpType.BITWISE_NOT: rule(_one("not"), *BITS),
    OpType.BIT_COUNT: rule(_bit_count, *INTEGERS),
    OpType.CLZ: rule(_clz, *INTEGERS),
    OpType.ADD: rule(_two("add"), *NUMBERS, *BOOL),
    OpType.SUB: rule(_two("subtract"), *NUMBERS),
    OpType.MUL: rule(_two("multiply"), *NUMBERS, *BOOL),
    OpType.DIV: rule(_two("divide"), *NUMBERS),
    OpType.REM: rule(_precise("remainder"), *INTEGERS, *FLOATS),
    OpType.POW: rule(_precise("power"), *NUMBERS),
    OpType.MAX: rule(_two("maximum"), *ORDERED),
    OpType.MIN: rule(_two("minimum"), *ORDERED),
    OpType.ATAN2: rule(_precise("atan2"), *FLOATS),
    OpType.BITWISE_AND: rule(_two("and"), *BITS),
    OpType.BITWISE_OR: rule(_two("or"), *BITS),
    OpType.BITWISE_XOR: rule(_two("xor"), *BITS),
    OpType.LOGICAL_AND: rule(_two("and"), *BOOL),
    OpType.LOGICAL_OR: rule(_two("or"), *BOOL),
    OpType.LOGICAL_XOR: rule(_two("xor"), *BOOL),
    OpType.SHIFT_LEFT: rule(widened(_shift("shift_left")), *INTEGERS),
    OpType.SHIFT_RIGHT_ARITHMETIC: rule(widened(_shift("shift_right_arithmetic")), *INTEGERS),
    OpType.SHIFT_RIGHT_LOGICAL: rule(_shift_right_logical, *INTEGERS),
    OpType.CLAMP: rule(widened(_clamp), *ORDERED),
    OpType.WHERE: rule(_where, *BOOL),
    **{
        pair[0]: rule(_comparison(direction), *(ALL if direction in ("EQ", "NE") else ORDERED))
        for direction, pair in _COMPARISONS.items()
    },
    **{pair[1]: rule(_total_order(direction), *FLOATS) for direction, pair in _COMPARISONS.items()},
}
