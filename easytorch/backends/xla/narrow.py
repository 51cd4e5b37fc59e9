"""Element types that XLA does not compute in: they are widened, computed and rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from easytorch.backends.dtypes import DType
from easytorch.backends.xla.emitter import Emitter, Value

T = TypeVar("T")

_FOUR_BITS = {DType.INT4: DType.INT8, DType.UINT4: DType.UINT8}


def wide_dtype(dtype: DType, least: int = 2) -> DType:
    """The type to compute in: int8 or uint8 for 4-bit integers, float32 for floats of fewer bytes than `least`."""
    if dtype.is_float and dtype.size < least:
        return DType.FLOAT32
    return _FOUR_BITS.get(dtype, dtype)


def widen(e: Emitter, x: Value, least: int = 2) -> Value:
    """x in the type to compute in."""
    return e.convert(x, wide_dtype(x.dtype, least))


def narrow(e: Emitter, x: Value, dtype: DType) -> Value:
    """x, computed in the wide type of `dtype`, as `dtype`: integers modulo its bits, floats rounded."""
    if dtype in _FOUR_BITS and x.dtype is not dtype:
        return e.convert(low_nibble(e, x, dtype), dtype)
    return e.convert(x, dtype)


def low_nibble(e: Emitter, x: Value, dtype: DType) -> Value:
    """The lowest four bits of each integer, in a byte: with their sign for int4."""
    byte = e.convert(x, _FOUR_BITS[dtype])
    four = e.like(byte, 4)
    shifted = e.binary("shift_left", byte, four)
    back = "shift_right_arithmetic" if dtype is DType.INT4 else "shift_right_logical"
    return e.binary(back, shifted, four)


def widened(emit: Callable[..., T], least: int = 2) -> Callable[..., T]:
    """`emit` with its operands widened; results in the wide type are rounded to the first operand's."""

    def written(e: Emitter, *operands: Value, **attributes: Any) -> Any:
        dtype = operands[0].dtype
        wide = wide_dtype(dtype, least)
        if wide is dtype:
            return emit(e, *operands, **attributes)
        result: Any = emit(e, *(e.convert(x, wide) if x.dtype is dtype else x for x in operands), **attributes)
        many = result if isinstance(result, tuple) and not isinstance(result, Value) else (result,)
        rounded = tuple(narrow(e, value, dtype) if value.dtype is wide else value for value in many)
        return rounded[0] if isinstance(result, Value) else rounded

    return written
