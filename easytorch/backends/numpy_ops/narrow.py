"""Computing in a wider type than the operands have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from easytorch.backends.dtypes import DType, dtype_of


def wide_dtype(dtype: np.dtype) -> np.dtype:
    """The type that elements of `dtype` are computed in: float32 for narrower floats, int8 for int4."""
    kind = dtype_of(dtype)
    if kind.is_float and kind.size < 4:
        return np.dtype(np.float32)
    if kind is DType.INT4:
        return np.dtype(np.int8)
    return np.dtype(np.uint8) if kind is DType.UINT4 else dtype


def widened(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """`function` of arrays of one type, computed in the wide type and rounded once; bool results stay."""

    def computed(*arrays: np.ndarray, **attributes: Any) -> np.ndarray:
        dtype = arrays[0].dtype
        wide = wide_dtype(dtype)
        with np.errstate(all="ignore"):
            result = np.asarray(function(*(array.astype(wide, copy=False) for array in arrays), **attributes))
            return result.astype(dtype) if wide != dtype and result.dtype == wide else result

    return computed
