"""Elementwise operations."""

from __future__ import annotations

from collections.abc import Collection

from easytorch.backends.dtypes import COMPLEX, FLOATS, SIGNED, UNSIGNED, DType
from easytorch.backends.errors import BackendError
from easytorch.backends.shapeinference.rule import Rule, broadcast_shapes, require_same_dtype, takes
from easytorch.backends.shapes import Shape
from easytorch.backends.types import OpType

_INTEGERS = (*SIGNED, *UNSIGNED)
_BOOL = (DType.BOOL,)
_NUMBERS = (*_INTEGERS, *FLOATS, *COMPLEX)
_ORDERED = (*_INTEGERS, *FLOATS, *_BOOL)
_FLOATING = (*FLOATS, *COMPLEX)


def _unary(allowed: Collection[DType], what: str) -> Rule:
    @takes(allowed, what)
    def rule(x: Shape) -> Shape:
        return x

    return rule


def _binary(allowed: Collection[DType], what: str) -> Rule:
    @takes(allowed, what)
    def rule(x0: Shape, x1: Shape) -> Shape:
        require_same_dtype(x0, x1)
        return Shape(x0.dtype, broadcast_shapes(x0, x1))

    return rule


def _comparison(allowed: Collection[DType], what: str) -> Rule:
    @takes(allowed, what)
    def rule(x0: Shape, x1: Shape) -> Shape:
        require_same_dtype(x0, x1)
        return Shape(DType.BOOL, broadcast_shapes(x0, x1))

    return rule


@takes(FLOATS, "floats")
def _test(x: Shape) -> Shape:
    return x.with_dtype(DType.BOOL)


@takes((*SIGNED, *FLOATS, *COMPLEX), "signed integers, floats and complex numbers")
def _abs(x: Shape) -> Shape:
    return x.with_dtype(x.dtype.real)


@takes(_FLOATING, "floats and complex numbers")
def _part(x: Shape) -> Shape:
    return x.with_dtype(x.dtype.real)


@takes((DType.FLOAT32, DType.FLOAT64), "float32 and float64")
def _complex(x0: Shape, x1: Shape) -> Shape:
    require_same_dtype(x0, x1)
    return Shape(x0.dtype.complex, broadcast_shapes(x0, x1))


@takes(_ORDERED, "integers, floats and bool")
def _clamp(min: Shape, x: Shape, max: Shape) -> Shape:
    require_same_dtype(min, x, max)
    if any(bound.rank and bound.dimensions != x.dimensions for bound in (min, max)):
        raise BackendError("min and max must be scalars or have the shape of x")
    return x


@takes(_BOOL, "a condition is bool")
def _where(condition: Shape, on_true: Shape, on_false: Shape) -> Shape:
    require_same_dtype(on_true, on_false)
    return Shape(on_true.dtype, broadcast_shapes(condition, on_true, on_false))


@takes((DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64), "floats of two bytes or more")
def _reduce_precision(x: Shape, exponent_bits: int, mantissa_bits: int) -> Shape:
    if not 1 <= exponent_bits <= 64 or not 0 <= mantissa_bits <= 64:
        raise BackendError(
            f"exponent_bits {exponent_bits} must be from 1 to 64, and mantissa_bits {mantissa_bits} from 0 to 64"
        )
    return x


_FLOAT_ONLY = _unary(FLOATS, "floats")
_ANALYTIC = _unary(_FLOATING, "floats and complex numbers")
_BITS = _unary((*_INTEGERS, *_BOOL), "integers and bool")
_COUNT = _unary(_INTEGERS, "integers")
_ARITHMETIC = _binary(_NUMBERS, "integers, floats and complex numbers")
_SUM = _binary((*_NUMBERS, *_BOOL), "any")
_BITWISE = _binary((*_INTEGERS, *_BOOL), "integers and bool")
_SHIFT = _binary(_INTEGERS, "integers")
_LOGICAL = _binary(_BOOL, "bool")
_EQUALITY = _comparison((*_NUMBERS, *_BOOL), "any")
_ORDER = _comparison(_ORDERED, "integers, floats and bool")
_TOTAL = _comparison(FLOATS, "floats")

RULES: dict[OpType, Rule] = {
    OpType.ABS: _abs,
    OpType.NEG: _unary(_NUMBERS, "integers, floats and complex numbers"),
    OpType.SIGN: _unary((*SIGNED, *FLOATS, *COMPLEX), "signed integers, floats and complex numbers"),
    OpType.CONJ: _unary(COMPLEX, "complex numbers"),
    OpType.REAL: _part,
    OpType.IMAG: _part,
    OpType.IS_FINITE: _test,
    OpType.IS_NAN: _test,
    **dict.fromkeys((OpType.CEIL, OpType.FLOOR, OpType.ROUND, OpType.ROUND_NEAREST_AFZ, OpType.ERF), _FLOAT_ONLY),
    **dict.fromkeys(
        (
            *(OpType.COS, OpType.SIN, OpType.EXP, OpType.EXPM1, OpType.LOG, OpType.LOG1P, OpType.LOGISTIC),
            *(OpType.RSQRT, OpType.SQRT, OpType.TANH, OpType.TAN, OpType.CBRT),
        ),
        _ANALYTIC,
    ),
    OpType.LOGICAL_NOT: _unary(_BOOL, "bool"),
    OpType.BITWISE_NOT: _BITS,
    OpType.BIT_COUNT: _COUNT,
    OpType.CLZ: _COUNT,
    OpType.ADD: _SUM,
    OpType.MUL: _SUM,
    OpType.SUB: _ARITHMETIC,
    OpType.DIV: _ARITHMETIC,
    OpType.REM: _binary((*_INTEGERS, *FLOATS), "integers and floats"),
    OpType.POW: _ARITHMETIC,
    OpType.MAX: _SUM,
    OpType.MIN: _SUM,
    OpType.ATAN2: _binary(_FLOATING, "floats and complex numbers"),
    OpType.REDUCE_PRECISION: _reduce_precision,
    **dict.fromkeys((OpType.BITWISE_AND, OpType.BITWISE_OR, OpType.BITWISE_XOR), _BITWISE),
    **dict.fromkeys((OpType.SHIFT_LEFT, OpType.SHIFT_RIGHT_ARITHMETIC, OpType.SHIFT_RIGHT_LOGICAL), _SHIFT),
    **dict.fromkeys((OpType.LOGICAL_AND, OpType.LOGICAL_OR, OpType.LOGICAL_XOR), _LOGICAL),
    OpType.COMPLEX: _complex,
    OpType.EQUAL: _EQUALITY,
    OpType.NOT_EQUAL: _EQUALITY,
    **dict.fromkeys(
        (OpType.LESS_THAN, OpType.LESS_OR_EQUAL, OpType.GREATER_THAN, OpType.GREATER_OR_EQUAL),
        _ORDER,
    ),
    **dict.fromkeys(
        (
            *(OpType.EQUAL_TOTAL_ORDER, OpType.NOT_EQUAL_TOTAL_ORDER, OpType.LESS_THAN_TOTAL_ORDER),
            *(OpType.LESS_OR_EQUAL_TOTAL_ORDER, OpType.GREATER_THAN_TOTAL_ORDER),
            OpType.GREATER_OR_EQUAL_TOTAL_ORDER,
        ),
        _TOTAL,
    ),
    OpType.CLAMP: _clamp,
    OpType.WHERE: _where,
    OpType.IDENTITY: lambda x: x,
}
