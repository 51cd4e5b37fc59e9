"""Operations on elements."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from easytorch.backends.dtypes import DType, dtype_of
from easytorch.backends.numpy_ops.narrow import widened
from easytorch.backends.types import OpType

_ERF = np.frompyfunc(math.erf, 1, 1)


def _is_integer(x: np.ndarray) -> bool:
    return dtype_of(x.dtype).is_integer


def _erf(x: np.ndarray) -> np.ndarray:
    return np.asarray(_ERF(x.astype(np.float64)), np.float64).astype(x.dtype)


def _logistic(x: np.ndarray) -> np.ndarray:
    if np.iscomplexobj(x):
        return 1 / (1 + np.exp(-x))
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small)).astype(x.dtype)


def _sign(x: np.ndarray) -> np.ndarray:
    if np.iscomplexobj(x):
        size = np.abs(x)
        return np.where(size == 0, x, x / np.where(size == 0, 1, size)).astype(x.dtype)
    return np.copysign(np.sign(x), x) if x.dtype.kind == "f" else np.sign(x)


def _divide(x0: np.ndarray, x1: np.ndarray) -> np.ndarray:
    if not _is_integer(x0):
        return np.true_divide(x0, x1)
    x0, x1 = np.broadcast_arrays(x0, x1)
    quotient = x0 - _remainder(x0, x1)
    safe = np.where(x1 == 0, 1, x1).astype(x0.dtype)
    # Exact, so rounding down is rounding towards zero; the least integer by -1 wraps to itself.
    exact = np.where(safe == -1, -quotient, quotient // safe) if x0.dtype.kind == "i" else quotient // safe
    all_bits = np.array(-1).astype(x0.dtype) if x0.dtype.kind == "i" else np.iinfo(x0.dtype).max
    return np.where(x1 == 0, all_bits, exact).astype(x0.dtype)


def _remainder(x0: np.ndarray, x1: np.ndarray) -> np.ndarray:
    if not _is_integer(x0):
        return np.fmod(x0, x1)
    safe = np.where((x1 == 0) | (x1 == -1 if x1.dtype.kind == "i" else False), 1, x1).astype(x0.dtype)
    return np.where(x1 == 0, x0, np.fmod(x0, safe)).astype(x0.dtype)


def _power(x0: np.ndarray, x1: np.ndarray) -> np.ndarray:
    if not _is_integer(x0):
        return np.power(x0, x1)
    result = np.power(x0, np.maximum(x1, 0).astype(x1.dtype))
    if x0.dtype.kind == "u":
        return result
    # 1 / x**n is an integer for 1 and -1 alone; by zero it is all bits, as division is.
    odd = np.where(x1 % 2 == 0, 1, -1)
    inverse = np.where(x0 == 1, 1, np.where(x0 == -1, odd, np.where(x0 == 0, -1, 0)))
    return np.where(x1 < 0, inverse, result).astype(x0.dtype)


def _shifted(shift: Callable[[np.ndarray, np.ndarray], np.ndarray], fill: str) -> Callable[..., np.ndarray]:
    def shifted(x0: np.ndarray, x1: np.ndarray) -> np.ndarray:
        bits = dtype_of(x0.dtype).bits
        unsigned = np.dtype(f"u{x0.dtype.itemsize}")
        wide0, wide1 = (_integers(x) for x in (x0, x1))
        outside = (wide1 < 0) | (wide1 >= bits)
        amount = np.where(outside, 0, wide1).astype(wide0.dtype)
        if fill == "sign":
            result = np.where(outside, np.where(wide0 < 0, -1, 0).astype(wide0.dtype), wide0 >> amount)
        elif bits < 8:
            mask = (1 << bits) - 1
            plain = wide0.astype(np.uint8) & np.uint8(mask)
            result = np.where(outside, 0, shift(plain, amount.astype(np.uint8)) & mask).astype(np.uint8)
            if dtype_of(x0.dtype) is DType.INT4:
                result = ((result ^ 8).astype(np.int8) - 8).astype(np.int8)
        else:
            plain = wide0.view(unsigned) if wide0.ndim else wide0.reshape(1).view(unsigned).reshape(())
            result = np.where(outside, 0, shift(plain, amount.astype(unsigned))).astype(unsigned).astype(wide0.dtype)
        return result.astype(x0.dtype)

    return shifted


def _integers(x: np.ndarray) -> np.ndarray:
    """Four-bit integers in a byte; others as they are."""
    narrow = {DType.INT4: np.int8, DType.UINT4: np.uint8}.get(dtype_of(x.dtype))
    return np.ascontiguousarray(x if narrow is None else x.astype(narrow)).reshape(x.shape)


def _count(x: np.ndarray, *, ones: bool) -> np.ndarray:
    bits = dtype_of(x.dtype).bits
    plain = _integers(x).astype(np.int64).astype(np.uint64) & np.uint64(2**bits - 1)
    if ones:
        return np.bitwise_count(plain).astype(x.dtype)
    length = np.zeros(plain.shape, np.int64)
    for step in (32, 16, 8, 4, 2, 1):
        high = plain >> np.uint64(step) != 0
        length += np.where(high, step, 0)
        plain = np.where(high, plain >> np.uint64(step), plain)
    return (bits - length - (plain != 0)).astype(x.dtype)


def _not(x: np.ndarray) -> np.ndarray:
    if dtype_of(x.dtype) in (DType.INT4, DType.UINT4):
        flipped = ~_integers(x)
        return (
            (flipped & 15).astype(np.uint8).astype(x.dtype)
            if dtype_of(x.dtype) is DType.UINT4
            else flipped.astype(x.dtype)
        )
    return np.invert(x)


def _bitwise(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda x0, x1: function(_integers(x0), _integers(x1)).astype(x0.dtype)


def _ordinals(x: np.ndarray) -> np.ndarray:
    """Integers in the total order of floats: their bits, those of negative numbers turned round."""
    bits = (
        np.ascontiguousarray(x).view(f"i{x.dtype.itemsize}") if x.ndim else x.reshape(1).view(f"i{x.dtype.itemsize}")[0]
    )
    wide = np.asarray(bits).astype(np.int64)
    return np.where(wide < 0, ~wide ^ np.int64(-(2 ** (8 * x.dtype.itemsize - 1))), wide).reshape(x.shape)


def _total(compare: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda x0, x1: compare(_ordinals(x0), _ordinals(x1))


def _compared(compare: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda x0, x1: np.asarray(compare(_comparable(x0), _comparable(x1)))


def _comparable(x: np.ndarray) -> np.ndarray:
    kind = dtype_of(x.dtype)
    return _integers(x) if kind.is_integer else x.astype(np.float32) if kind.is_float and kind.size < 4 else x


def _convert(x: np.ndarray, dtype: DType) -> np.ndarray:
    source = dtype_of(x.dtype)
    if dtype is DType.BOOL:
        return np.asarray(_comparable(x) != 0)
    if source.is_complex and not dtype.is_complex:
        x, source = x.real, source.real
    if source.is_float and dtype.is_integer:
        return _truncated(x, dtype)
    wide = _comparable(x)
    with np.errstate(all="ignore"):
        if dtype.is_integer and dtype.bits == 4:
            low = wide.astype(np.int64) & 15
            return (np.where(low > 7, low - 16, low) if dtype is DType.INT4 else low).astype(dtype.numpy)
        return wide.astype(dtype.numpy)


def _truncated(x: np.ndarray, dtype: DType) -> np.ndarray:
    """Floats to integers: towards zero, clamped, NaN to 0."""
    wide = np.trunc(x.astype(np.float64))
    signed = dtype.value.startswith("int")
    least = -(2 ** (dtype.bits - 1)) if signed else 0
    most = 2 ** (dtype.bits - (1 if signed else 0)) - 1
    inside = np.where(np.isnan(wide) | (wide < least) | (wide >= float(most)), 0, wide)
    integers = inside.astype(np.int64 if signed else np.uint64)
    integers = np.where(wide < least, np.array(least, integers.dtype), integers)
    return np.where(wide >= float(most), np.array(most, integers.dtype), integers).astype(dtype.numpy)


def _bitcast(x: np.ndarray, target_dtype: DType) -> np.ndarray:
    source = dtype_of(x.dtype)
    if source.bits == target_dtype.bits:
        if source.bits == 4:
            return _convert(x, target_dtype)
        return x.reshape(-1).view(target_dtype.numpy).reshape(x.shape)
    if 4 in (source.bits, target_dtype.bits):
        return _bitcast_nibbles(x, source, target_dtype)
    flat = np.ascontiguousarray(x).reshape(-1).view(target_dtype.numpy)
    return flat.reshape((*x.shape, -1) if source.bits > target_dtype.bits else x.shape[:-1])


def _bitcast_nibbles(x: np.ndarray, source: DType, target: DType) -> np.ndarray:
    """Four-bit elements stand one to a byte here: they are put together, the lower first, or taken apart."""
    if source.bits == 4:
        nibbles = (_integers(x).astype(np.int64) & 15).astype(np.uint8).reshape(-1, 2)
        return (nibbles[:, 0] | nibbles[:, 1] << 4).view(target.numpy).reshape(x.shape[:-1])
    data = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    nibbles = np.stack([data & 15, data >> 4], -1).reshape(-1)
    return _convert(nibbles, target).reshape(*x.shape, source.bits // 4)


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


def _gelu(x: np.ndarray, approximate: bool) -> np.ndarray:
    if approximate:
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        return (0.5 * x * (1 + np.tanh(inner))).astype(x.dtype)
    return (0.5 * x * (1 + _erf(x * math.sqrt(0.5)))).astype(x.dtype)


ELEMENTWISE: dict[OpType, Callable[..., np.ndarray]] = {
    OpType.IDENTITY: lambda x: x,
    OpType.ABS: widened(np.abs),
    OpType.NEG: widened(np.negative),
    OpType.SIGN: widened(_sign),
    OpType.CEIL: widened(np.ceil),
    OpType.FLOOR: widened(np.floor),
    OpType.ROUND: widened(np.rint),
    OpType.COS: widened(np.cos),
    OpType.SIN: widened(np.sin),
    OpType.ERF: widened(_erf),
    OpType.EXP: widened(np.exp),
    OpType.EXPM1: widened(np.expm1),
    OpType.LOG: widened(np.log),
    OpType.LOG1P: widened(np.log1p),
    OpType.LOGISTIC: widened(_logistic),
    OpType.RSQRT: widened(lambda x: 1 / np.sqrt(x)),
    OpType.SQRT: widened(np.sqrt),
    OpType.TANH: widened(np.tanh),
    OpType.REAL: _part("real"),
    OpType.IMAG: _part("imag"),
    OpType.CONJ: np.conj,
    OpType.IS_FINITE: widened(np.isfinite),
    OpType.IS_NAN: widened(np.isnan),
    OpType.LOGICAL_NOT: np.logical_not,
    OpType.BITWISE_NOT: _not,
    OpType.BIT_COUNT: lambda x: _count(x, ones=True),
    OpType.CLZ: lambda x: _count(x, ones=False),
    OpType.ADD: widened(np.add),
    OpType.SUB: widened(np.subtract),
    OpType.MUL: widened(np.multiply),
    OpType.DIV: widened(_divide),
    OpType.REM: widened(_remainder),
    OpType.POW: widened(_power),
    OpType.MAX: widened(np.maximum),
    OpType.MIN: widened(np.minimum),
    OpType.ATAN2: widened(np.arctan2),
    OpType.BITWISE_AND: _bitwise(np.bitwise_and),
    OpType.BITWISE_OR: _bitwise(np.bitwise_or),
    OpType.BITWISE_XOR: _bitwise(np.bitwise_xor),
    OpType.SHIFT_LEFT: _shifted(np.left_shift, "zero"),
    OpType.SHIFT_RIGHT_ARITHMETIC: _shifted(np.right_shift, "sign"),
    OpType.SHIFT_RIGHT_LOGICAL: _shifted(np.right_shift, "zero"),
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
    OpType.CONVERT_DTYPE: _convert,
    OpType.BITCAST: _bitcast,
    OpType.GELU: widened(_gelu),
}
