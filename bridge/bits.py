"""Arrays compared and viewed bit by bit."""

from __future__ import annotations

import numpy as np


def bits(array: np.ndarray) -> np.ndarray:
    """The elements as unsigned integers, so that NaN equals itself and -0 differs from 0; complex128 as pairs."""
    if array.dtype.itemsize > 8:
        return np.ascontiguousarray(array).view(np.uint64)
    return array.view(f"u{array.dtype.itemsize}")


def identical(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether dtype, shape and every bit agree; the same memory is not read."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.strides == other.strides and one.ctypes.data == other.ctypes.data:
        return True
    return np.array_equal(bits(one), bits(other))
