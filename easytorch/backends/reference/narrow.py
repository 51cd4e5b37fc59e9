"""Element types that are computed in a wider one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from easytorch.backends.dtypes import DType, dtype_of

T = TypeVar("T")


def wide_dtype(dtype: np.dtype) -> np.dtype:
    """The type that elements of `dtype` are computed in: float32 for narrower floats, int8 for int4."""
    kind = dtype_of(dtype)
    if kind.is_float and kind.size < 4:
        return np.dtype(np.float32)
    if kind is DType.INT4:
        return np.dtype(np.int8)
    return np.dtype(np.uint8) if kind is DType.UINT4 else dtype


def wide(x: np.ndarray) -> np.ndarray:
    """x in the type that it is computed in."""
    return x.astype(wide_dtype(x.dtype), copy=False)


def wrapped(x: np.ndarray, dtype: DType) -> np.ndarray:
    """Integers modulo 2**bits of `dtype`."""
    if dtype.bits == 4:
        low = x.astype(np.int64) & 15
        return np.asarray(np.where(low > 7, low - 16, low) if dtype is DType.INT4 else low).astype(dtype.numpy)
    return x.astype(dtype.numpy)


def narrowed(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A result in the wide type, rounded or wrapped to `dtype`; results of other types are returned unchanged."""
    if x.dtype == dtype or x.dtype != wide_dtype(dtype):
        return x
    kind = dtype_of(dtype)
    return wrapped(x, kind) if kind.is_integer else x.astype(dtype)


def widened(function: Callable[..., T]) -> Callable[..., T]:
    """`function` of arrays of one type, computed in the wide type and rounded once; bool results stay bool."""

    def computed(*arrays: np.ndarray, **attributes: Any) -> Any:
        dtype = arrays[0].dtype
        with np.errstate(all="ignore"):
            result = function(*map(wide, arrays), **attributes)
            if isinstance(result, tuple):
                return tuple(narrowed(np.asarray(one), dtype) for one in result)
            return narrowed(np.asarray(result), dtype)

    return computed
