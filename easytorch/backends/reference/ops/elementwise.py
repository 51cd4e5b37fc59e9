"""Elementwise operations."""

from __future__ import annotations

import math
from collections.abc import Callable

import ml_dtypes
import numpy as np

from easytorch.backends.dtypes import dtype_of
from easytorch.backends.reference.narrow import wide, widened, wrapped
from easytorch.backends.types import OpType

_ERF = np.frompyfunc(math.erf, 1, 1)


def _is_integer(x: np.ndarray) -> bool:
    return dtype_of(x.dtype).is_integer


def erf(x: np.ndarray) -> np.ndarray:
    return np.asarray(_ERF(x.astype(np.float64)), np.float64).astype(x.dtype)


def _logistic(x: np.ndarray) -> np.ndarray:
    positive = x.real >= 0
    small = np.exp(np.where(positive, -x, x))
    return np.asarray(np.where(positive, 1, small) / (1 + small))


def _expm1(x: np.ndarray) -> np.ndarray:
    if not np.iscomplexobj(x):
        return np.asarray(np.expm1(x))
    # e^a cos b - 1 without subtracting nearly equal numbers; b = 0 stays 0 where e^a is infinite.
    real = np.expm1(x.real) * np.cos(x.imag) - 2 * np.sin(x.imag / 2) ** 2
    imaginary = np.exp(x.real) * np.sin(x.imag)
    # e^a alone may be infinite where e^a cos b is not; from 40 on the 1 is below the last digit.
    root = np.exp(x.real / 2)
    real = np.where(x.real > 40, root * np.cos(x.imag) * root, real)
    imaginary = np.where(x.real > 40, root * np.sin(x.imag) * root, imaginary)
    imaginary = np.where(x.imag == 0, x.imag, imaginary)
    return _complex(np.where(x.imag == 0, np.expm1(x.real), real), imaginary)


def _log1p(x: np.ndarray) -> np.ndarray:
    if not np.iscomplexobj(x):
        return np.asarray(np.log1p(x))
    shifted = 1 + x.real
    large, small = np.maximum(abs(shifted), abs(x.imag)), np.minimum(abs(shifted), abs(x.imag))
    # log |1 + x| without squares that overflow or underflow.
    ratio = np.where(large == 0, 0, small / np.where(large == 0, 1, large))
    far = np.where(np.isinf(x.real) | np.isinf(x.imag), np.inf, np.log(large) + np.log1p(ratio * ratio) / 2)
    near = np.hypot(x.real, x.imag) < 0.5
    square = np.where(near, x.real * (2 + x.real) + x.imag**2, 0)
    return _complex(np.where(near, np.log1p(square) / 2, far), np.arctan2(x.imag, shifted))


def _cbrt(x: np.ndarray) -> np.ndarray:
    if not np.iscomplexobj(x):
        return np.asarray(np.cbrt(x))
    # By modulus and angle: the logarithm of a large number has few digits after the point. Scaled by powers of eight,
    # so that the modulus neither overflows nor is subnormal.
    large = np.maximum(np.abs(x.real), np.abs(x.imag)) > 1
    scale = np.where(large, 2.0**-30, 2.0**300)
    size = np.cbrt(np.hypot(x.real * scale, x.imag * scale)) * np.where(large, 2.0**10, 2.0**-100)
    angle = np.arctan2(x.imag, x.real) / 3
    return _complex(size * np.cos(angle), np.where(angle == 0, angle, size * np.sin(angle)))


def _atan2(x0: np.ndarray, x1: np.ndarray) -> np.ndarray:
    if not np.iscomplexobj(x0):
        return np.asarray(np.arctan2(x0, x1))
    # Divided by the largest part first, so that the squares neither overflow nor underflow.
    large = np.maximum.reduce([np.abs(part) for x in (x0, x1) for part in (x.real, x.imag)])
    scale = np.where((large > 0) & (large < np.inf), large, 1)
    x0, x1 = (_complex(x.real / scale, x.imag / scale) for x in (x0, x1))
    return np.asarray(-1j * np.log((x1 + 1j * x0) / np.sqrt(x1 * x1 + x0 * x0)))


def _round_nearest_afz(x: np.ndarray) -> np.ndarray:
    truncated = np.trunc(x)
    return np.asarray(np.copysign(np.where(np.abs(x - truncated) >= 0.5, np.abs(truncated) + 1, np.abs(truncated)), x))


def _reduce_precision(x: np.ndarray, exponent_bits: int, mantissa_bits: int) -> np.ndarray:
    """Rounds the bit patterns half to even: add half of the last kept bit, less one if that bit is even, then
    truncate."""
    info = ml_dtypes.finfo(x.dtype)
    mantissa, exponent = info.nmant, info.bits - 1 - info.nmant
    word = np.dtype(f"u{x.dtype.itemsize}").type
    bits = np.ascontiguousarray(x).reshape(-1).view(word).reshape(x.shape)
    sign, kept = bits & word(1 << info.bits - 1), bits & word((1 << info.bits - 1) - 1)
    infinity = word((1 << exponent) - 1 << mantissa)
    nan = kept > infinity
    if mantissa_bits < mantissa:
        cut = mantissa - mantissa_bits
        kept = kept + ((kept >> word(cut)) & word(1)) + word((1 << cut - 1) - 1) & ~word((1 << cut) - 1)
    if exponent_bits < exponent:
        bias, least = (1 << exponent - 1) - 1, (1 << exponent_bits - 1) - 1
        kept = np.where(kept >= word(bias + least + 1 << mantissa), infinity, kept)
        kept = np.where(kept >> word(mantissa) <= word(bias - least), word(0), kept)
    found = np.where(nan, bits, sign | kept).astype(word)
    return np.asarray(found.reshape(-1).view(x.dtype).reshape(x.shape))


def _analytic(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """complex64 is computed in complex128: NumPy loses half the digits of some functions."""

    def computed(*arrays: np.ndarray) -> np.ndarray:
        if arrays[0].dtype != np.complex64:
            return function(*arrays)
        return function(*(array.astype(np.complex128) for array in arrays)).astype(np.complex64)

    return widened(computed)


def _sign(x: np.ndarray) -> np.ndarray:
    if np.iscomplexobj(x):
        # Divided by the larger part first: the modulus of the smallest and largest numbers underflows or overflows.
        large = np.maximum(abs(x.real), abs(x.imag))
        scale = np.where(large == 0, 1, large)
        real, imaginary = x.real / scale, x.imag / scale
        size = np.where(large == 0, 1, np.hypot(real, imaginary))
        return _complex(np.where(large == 0, x.real, real / size), np.where(large == 0, x.imag, imaginary / size))
    return np.asarray(np.copysign(np.sign(x), x) if x.dtype.kind == "f" else np.sign(x))


def _divide(x0: np.ndarray, x1: np.ndarray) -> np.ndarray:
    if not _is_integer(x0):
        return np.asarray(np.true_divide(x0, x1))
    x0, x1 = np.broadcast_arrays(x0, x1)
    quotient = x0 - _remainder(x0, x1)
    safe = np.where(x1 == 0, 1, x1).astype(x0.dtype)
    # The division is exact here, so `//` does not round; the least integer by -1 wraps to itself.
    exact = np.where(safe == -1, -quotient, quotient // safe) if x0.dtype.kind == "i" else quotient // safe
    all_bits = np.array(-1).astype(x0.dtype) if x0.dtype.kind == "i" else np.iinfo(x0.dtype).max
    return np.where(x1 == 0, all_bits, exact).astype(x0.dtype)


def _remainder(x0: np.ndarray, x1: np.ndarray) -> np.ndarray:
    if not _is_integer(x0):
        return np.asarray(np.fmod(x0, x1))
    safe = np.where((x1 == 0) | (x1 == -1 if x1.dtype.kind == "i" else False), 1, x1).astype(x0.dtype)
    return np.where(x1 == 0, x0, np.fmod(x0, safe)).astype(x0.dtype)


def _power(x0: np.ndarray, x1: np.ndarray) -> np.ndarray:
    if not _is_integer(x0):
        return np.asarray(np.power(x0, x1))
    result = np.asarray(np.power(x0, np.maximum(x1, 0).astype(x1.dtype)))
    if x0.dtype.kind == "u":
        return result
    # 1 / x**n is an integer only for x = 1 and x = -1; for x = 0 all bits are set, as in a division by zero.
    odd = np.where(x1 % 2 == 0, 1, -1)
    inverse = np.where(x0 == 1, 1, np.where(x0 == -1, odd, np.where(x0 == 0, -1, 0)))
    return np.where(x1 < 0, inverse, result).astype(x0.dtype)


def _shifted(shift: Callable[..., np.ndarray], *, by_sign: bool) -> Callable[..., np.ndarray]:
    """Shifts that treat the highest bit as the sign, also of an unsigned integer."""

    def shifted(x0: np.ndarray, x1: np.ndarray) -> np.ndarray:
        dtype = dtype_of(x0.dtype)
        # Every type fits into 64 bits, extended by its sign or by zeros.
        word = np.int64 if by_sign else np.uint64
        top = wide(x0).astype(np.int64).astype(np.uint64) << np.uint64(64 - dtype.bits)
        bits = np.asarray(top.view(word) >> word(64 - dtype.bits))
        amount = wide(x1)
        outside = (amount < 0) | (amount >= dtype.bits)
        result = shift(bits, np.where(outside, 0, amount).astype(word))
        beyond = np.where(bits < 0, -1, 0).astype(word) if by_sign else word(0)
        return wrapped(np.where(outside, beyond, result), dtype)

    return shifted


def _count(x: np.ndarray, *, ones: bool) -> np.ndarray:
    bits = dtype_of(x.dtype).bits
    plain = wide(x).astype(np.int64).astype(np.uint64) & np.uint64(2**bits - 1)
    if ones:
        return np.asarray(np.bitwise_count(plain), x.dtype)
    length = np.zeros(plain.shape, np.int64)
    for step in (32, 16, 8, 4, 2, 1):
        high = plain >> np.uint64(step) != 0
        length += np.where(high, step, 0)
        plain = np.where(high, plain >> np.uint64(step), plain)
    return np.asarray(bits - length - (plain != 0), x.dtype)


def _ordinals(x: np.ndarray) -> np.ndarray:
    """Integers that sort as IEEE's total order of the floats: their bits, inverted for negative numbers."""
    size = x.dtype.itemsize
    signed = np.ascontiguousarray(x).reshape(-1).view(f"i{size}").astype(np.int64)
    return np.where(signed < 0, ~signed ^ np.int64(-(2 ** (8 * size - 1))), signed).reshape(x.shape)


def _total(compare: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda x0, x1: compare(_ordinals(x0), _ordinals(x1))


def _compared(compare: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda x0, x1: np.asarray(compare(wide(x0), wide(x1)))


def _part(name: str) -> Callable[[np.ndarray], np.ndarray]:
    def part(x: np.ndarray) -> np.ndarray:
        if np.iscomplexobj(x):
            return np.ascontiguousarray(getattr(x, name)).reshape(x.shape)
        return x if name == "real" else np.zeros_like(x)

    return part


def _complex(x0: np.ndarray, x1: np.ndarray) -> np.ndarray:
    x0, x1 = np.broadcast_arrays(x0, x1)
    result = np.empty(x0.shape, dtype_of(x0.dtype).complex.numpy)
    result.real, result.imag = x0, x1
    return result


def _where(condition: np.ndarray, on_true: np.ndarray, on_false: np.ndarray) -> np.ndarray:
    return np.where(condition, on_true, on_false)


ELEMENTWISE: dict[OpType, Callable[..., np.ndarray]] = {
    OpType.IDENTITY: lambda x: x,
    OpType.ABS: widened(np.abs),
    OpType.NEG: widened(np.negative),
    OpType.SIGN: widened(_sign),
    OpType.CEIL: widened(np.ceil),
    OpType.FLOOR: widened(np.floor),
    OpType.ROUND: widened(np.rint),
    OpType.COS: _analytic(np.cos),
    OpType.SIN: _analytic(np.sin),
    OpType.ERF: widened(erf),
    OpType.EXP: _analytic(np.exp),
    OpType.EXPM1: _analytic(_expm1),
    OpType.LOG: _analytic(np.log),
    OpType.LOG1P: _analytic(_log1p),
    OpType.LOGISTIC: _analytic(_logistic),
    OpType.RSQRT: _analytic(lambda x: 1 / np.sqrt(x)),
    OpType.SQRT: _analytic(np.sqrt),
    OpType.TANH: _analytic(np.tanh),
    OpType.TAN: _analytic(np.tan),
    OpType.CBRT: _analytic(_cbrt),
    OpType.ROUND_NEAREST_AFZ: widened(_round_nearest_afz),
    OpType.REDUCE_PRECISION: _reduce_precision,
    OpType.REAL: _part("real"),
    OpType.IMAG: _part("imag"),
    OpType.CONJ: np.conj,
    OpType.IS_FINITE: widened(np.isfinite),
    OpType.IS_NAN: widened(np.isnan),
    OpType.LOGICAL_NOT: np.logical_not,
    OpType.BITWISE_NOT: widened(np.invert),
    OpType.BIT_COUNT: lambda x: _count(x, ones=True),
    OpType.CLZ: lambda x: _count(x, ones=False),
    OpType.ADD: widened(np.add),
    OpType.SUB: widened(np.subtract),
    OpType.MUL: widened(np.multiply),
    OpType.DIV: widened(_divide),
    OpType.REM: widened(_remainder),
    OpType.POW: _analytic(_power),
    OpType.MAX: widened(np.maximum),
    OpType.MIN: widened(np.minimum),
    OpType.ATAN2: _analytic(_atan2),
    OpType.BITWISE_AND: widened(np.bitwise_and),
    OpType.BITWISE_OR: widened(np.bitwise_or),
    OpType.BITWISE_XOR: widened(np.bitwise_xor),
    OpType.SHIFT_LEFT: _shifted(np.left_shift, by_sign=False),
    OpType.SHIFT_RIGHT_ARITHMETIC: _shifted(np.right_shift, by_sign=True),
    OpType.SHIFT_RIGHT_LOGICAL: _shifted(np.right_shift, by_sign=False),
    OpType.LOGICAL_AND: np.logical_and,
    OpType.LOGICAL_OR: np.logical_or,
    OpType.LOGICAL_XOR: np.logical_xor,
    OpType.COMPLEX: _complex,
    OpType.EQUAL: _compared(np.equal),
    OpType.NOT_EQUAL: _compared(np.not_equal),
    OpType.LESS_THAN: _compared(np.less),
    OpType.LESS_OR_EQUAL: _compared(np.less_equal),
    OpType.GREATER_THAN: _compared(np.greater),
    OpType.GREATER_OR_EQUAL: _compared(np.greater_equal),
    OpType.EQUAL_TOTAL_ORDER: _total(np.equal),
    OpType.NOT_EQUAL_TOTAL_ORDER: _total(np.not_equal),
    OpType.LESS_THAN_TOTAL_ORDER: _total(np.less),
    OpType.LESS_OR_EQUAL_TOTAL_ORDER: _total(np.less_equal),
    OpType.GREATER_THAN_TOTAL_ORDER: _total(np.greater),
    OpType.GREATER_OR_EQUAL_TOTAL_ORDER: _total(np.greater_equal),
    OpType.CLAMP: widened(lambda min, x, max: np.minimum(np.maximum(x, min), max)),
    OpType.WHERE: _where,
}
