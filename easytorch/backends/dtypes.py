"""Element types, by numpy's names and those of ml_dtypes for what numpy lacks."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import ml_dtypes
import numpy as np

from easytorch.backends.errors import BackendError


class DType(StrEnum):
    """An element type; its value is the name numpy, torch and jax know it by."""

    BOOL = "bool"
    INT4 = "int4"
    INT8 = "int8"
    INT16 = "int16"
    INT32 = "int32"
    INT64 = "int64"
    UINT4 = "uint4"
    UINT8 = "uint8"
    UINT16 = "uint16"
    UINT32 = "uint32"
    UINT64 = "uint64"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"
    FLOAT8_E4M3FNUZ = "float8_e4m3fnuz"
    FLOAT8_E5M2FNUZ = "float8_e5m2fnuz"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"
    COMPLEX64 = "complex64"
    COMPLEX128 = "complex128"

    @property
    def numpy(self) -> np.dtype:
        return _NUMPY[self]

    @property
    def size(self) -> int:
        """Bytes of one element as numpy holds it: the four-bit kinds one to a byte."""
        return _NUMPY[self].itemsize

    @property
    def bits(self) -> int:
        """Bits that carry the value."""
        return 4 if self in (DType.INT4, DType.UINT4) else 8 * self.size

    @property
    def is_float(self) -> bool:
        """Whether it is a real floating point dtype; a complex one is not."""
        return self in FLOATS

    @property
    def is_complex(self) -> bool:
        return self in COMPLEX

    @property
    def is_integer(self) -> bool:
        """Whether it is a signed or unsigned integer; bool is not."""
        return self in SIGNED or self in UNSIGNED

    @property
    def real(self) -> DType:
        """The type of the parts of a complex type; itself for any other."""
        return {DType.COMPLEX64: DType.FLOAT32, DType.COMPLEX128: DType.FLOAT64}.get(self, self)

    @property
    def complex(self) -> DType:
        """The complex type with parts of this one; `BackendError` where there is none."""
        found = {DType.FLOAT32: DType.COMPLEX64, DType.FLOAT64: DType.COMPLEX128}.get(self)
        if found is None:
            raise BackendError(f"there is no complex type with parts of {self}; use float32 or float64")
        return found


_NUMPY = {dtype: np.dtype(getattr(ml_dtypes, dtype.value, dtype.value)) for dtype in DType}
# By name: numpy has two types of 64 bits that differ only in the name C has for them (`np.ulonglong`).
_BY_NAME = {dtype.value: dtype for dtype in DType}
SIGNED = (DType.INT4, DType.INT8, DType.INT16, DType.INT32, DType.INT64)
UNSIGNED = (DType.UINT4, DType.UINT8, DType.UINT16, DType.UINT32, DType.UINT64)
FLOATS = tuple(dtype for dtype in DType if "float" in dtype.value)
COMPLEX = (DType.COMPLEX64, DType.COMPLEX128)


def dtype_of(given: Any) -> DType:
    """The element type that `given` names: a `DType`, its name, a numpy or a torch dtype, or a Python type.

    `BackendError` listing the known ones for anything else.
    """
    if isinstance(given, DType):
        return given
    # Where numpy and torch are given nothing they take float64, and of an array its type: neither is named.
    named = isinstance(given, str | type | np.dtype) or type(given).__module__ == "torch"
    found = _BY_NAME.get(str(given).removeprefix("torch.")) if named else None
    if found is None and named:
        try:
            found = _BY_NAME.get(np.dtype(given).name)
        except (TypeError, ValueError, SyntaxError):
            found = None
    if found is None:
        raise BackendError(f"{given!r} is no element type; known: {', '.join(DType)}")
    return found


def array_of(given: Any, what: str) -> np.ndarray:
    """Numbers as an array of exactly the numpy dtype that stands for their element type, over the same memory if it is.

    `BackendError` for what is no array of numbers.
    """
    try:
        array = np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BackendError(f"{what}: no array can be made of what was given: {error}") from None
    try:
        wanted = dtype_of(array.dtype).numpy
    except BackendError as error:
        raise BackendError(f"{what}: {error}") from None
    if array.dtype is wanted:
        return array
    # Of another name in C, with the same bits; or of the other byte order.
    return array.view(wanted) if array.dtype == wanted else array.astype(wanted)


def lowest(dtype: DType) -> float | int | bool:
    """The least value of the dtype: minus infinity, or the most negative number where it has none."""
    return _end(dtype, greatest=False)


def highest(dtype: DType) -> float | int | bool:
    """The greatest value of the dtype: infinity, or the largest number where it has none."""
    return _end(dtype, greatest=True)


def _end(dtype: DType, *, greatest: bool) -> float | int | bool:
    if dtype is DType.BOOL:
        return greatest
    if dtype.is_integer:
        bits = dtype.bits - (dtype in SIGNED)
        return 2**bits - 1 if greatest else -(2**bits) if dtype in SIGNED else 0
    with np.errstate(all="ignore"):
        infinity = np.array(np.inf, np.float32).astype(dtype.numpy)
    end = infinity if np.isinf(infinity.astype(np.float32)) else ml_dtypes.finfo(dtype.numpy).max
    return float(end) if greatest else -float(end)
