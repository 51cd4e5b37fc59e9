"""Reductions over axes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from easytorch.backends.dtypes import DType, dtype_of, highest, lowest
from easytorch.backends.reference.narrow import narrowed, wide, widened
from easytorch.backends.types import OpType, ReduceOpType

UFUNCS = {
    ReduceOpType.SUM: np.add,
    ReduceOpType.PRODUCT: np.multiply,
    ReduceOpType.MAX: np.maximum,
    ReduceOpType.MIN: np.minimum,
}


def neutral(reduction: ReduceOpType, dtype: DType) -> bool | float:
    """The identity of the reduction in `dtype`."""
    if reduction is ReduceOpType.SUM:
        return 0
    if reduction is ReduceOpType.PRODUCT:
        return 1
    return lowest(dtype) if reduction is ReduceOpType.MAX else highest(dtype)


def reduced(x: np.ndarray, reduction: ReduceOpType, axes: tuple[int, ...]) -> np.ndarray:
    """x reduced over `axes`: narrow floats in float32, integers modulo 2**bits."""
    start = neutral(reduction, dtype_of(x.dtype))
    with np.errstate(all="ignore"):
        result = UFUNCS[reduction].reduce(wide(x), axis=axes, dtype=wide(x).dtype, initial=start)
        return narrowed(np.asarray(result), x.dtype)


def _reduce(reduction: ReduceOpType) -> Callable[..., np.ndarray]:
    return lambda x, axes: reduced(x, reduction, axes or tuple(range(x.ndim)))


def _bits(function: np.ufunc) -> Callable[..., np.ndarray]:
    return widened(lambda x, axes: function.reduce(x, axis=axes or tuple(range(x.ndim)), dtype=x.dtype))


def _arg_min_max(x: np.ndarray, axis: int, output_dtype: DType, is_min: bool) -> np.ndarray:
    # NumPy takes the first NaN, else the first of equal extremes.
    return np.asarray((np.argmin if is_min else np.argmax)(wide(x), axis)).astype(output_dtype.numpy)


# How many elements of an intermediate result are held at once, where it would be larger than operands and result.
BLOCK = 2**20


REDUCTION: dict[OpType, Callable[..., np.ndarray]] = {
    OpType.REDUCE_SUM: _reduce(ReduceOpType.SUM),
    OpType.REDUCE_PRODUCT: _reduce(ReduceOpType.PRODUCT),
    OpType.REDUCE_MAX: _reduce(ReduceOpType.MAX),
    OpType.REDUCE_MIN: _reduce(ReduceOpType.MIN),
    OpType.REDUCE_BITWISE_AND: _bits(np.bitwise_and),
    OpType.REDUCE_BITWISE_OR: _bits(np.bitwise_or),
    OpType.REDUCE_BITWISE_XOR: _bits(np.bitwise_xor),
    OpType.REDUCE_LOGICAL_AND: _bits(np.logical_and),
    OpType.REDUCE_LOGICAL_OR: _bits(np.logical_or),
    OpType.REDUCE_LOGICAL_XOR: _bits(np.logical_xor),
    OpType.ARG_MIN_MAX: _arg_min_max,
}
