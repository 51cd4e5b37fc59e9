"""Casts of floating point elements that may round a finite number but refuse to make it infinite."""

from __future__ import annotations

from functools import cache

import ml_dtypes
import numpy as np

from easytorch.bridge.dtypes import FLOATING
from easytorch.bridge.errors import CheckpointError

# The exponent bits of infinities and NaN in the dtypes that weights are most often cast to.
_EXPONENTS = {"float16": 0x7C00, "bfloat16": 0x7F80}


class CastOverflow(CheckpointError):
    """A number that the requested element type cannot represent."""

    def of(self, tensor: str) -> CheckpointError:
        """The error for `tensor`."""
        return CheckpointError(str(self), tensor=tensor)


def cast_into(out: np.ndarray, array: np.ndarray) -> None:
    """Fills `out` with the elements of `array`, rounded to its dtype; `CastOverflow` where a number overflows."""
    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(out, array, casting="unsafe")
    if not _narrows(array.dtype, out.dtype) or _finite(out).all():
        return
    lost = ~_finite(out) & _finite(array)
    if lost.any():
        value = float(array[lost][0])
        raise CastOverflow(
            f"holds {value:.4g}, and {_why_not(value, out.dtype)}; give another dtype, as bf16 or fp32, or leave the "
            "tensor out (--drop)"
        )


def cast(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`array` in `dtype`: itself where it is so already."""
    if array.dtype == dtype:
        return array
    made = np.empty(array.shape, dtype)
    cast_into(made, array)
    return made


def _narrows(given: np.dtype, made: np.dtype) -> bool:
    if given.name not in FLOATING or made.name not in FLOATING:
        return False
    return _largest(made) < _largest(given) or float(ml_dtypes.finfo(made).min) >= 0


def _why_not(value: float, made: np.dtype) -> str:
    if value <= 0 < float(ml_dtypes.finfo(made).min):
        return f"{made.name} has neither zero nor negative numbers"
    return f"the largest {made.name} is {_largest(made):.4g}"


@cache
def _largest(dtype: np.dtype) -> float:
    return float(ml_dtypes.finfo(dtype).max)


def _finite(array: np.ndarray) -> np.ndarray:
    exponent = _EXPONENTS.get(array.dtype.name)
    if exponent is None:
        finite: np.ndarray = np.isfinite(array if array.dtype.itemsize > 2 else array.astype(np.float32))
    else:
        finite = (array.view(np.uint16) & exponent) != exponent
    return finite
