"""Reductions over axes and over windows, and what scatters back from windows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from easytorch.backends.dtypes import DType, dtype_of, highest, lowest
from easytorch.backends.numpy_ops.movement import padded
from easytorch.backends.numpy_ops.narrow import narrowed, wide, widened
from easytorch.backends.types import OpType, PadAxis, ReduceOpType

_UFUNCS = {
    ReduceOpType.SUM: np.add,
    ReduceOpType.PRODUCT: np.multiply,
    ReduceOpType.MAX: np.maximum,
    ReduceOpType.MIN: np.minimum,
}


def neutral(reduction: ReduceOpType, dtype: DType) -> bool | float:
    """What changes no element of `dtype` it is put together with."""
    if reduction is ReduceOpType.SUM:
        return 0
    if reduction is ReduceOpType.PRODUCT:
        return 1
    return lowest(dtype) if reduction is ReduceOpType.MAX else highest(dtype)


def reduced(x: np.ndarray, reduction: ReduceOpType, axes: tuple[int, ...]) -> np.ndarray:
    """x put together over `axes`: narrow floats in float32, integers modulo 2**bits."""
    start = neutral(reduction, dtype_of(x.dtype))
    with np.errstate(all="ignore"):
        result = _UFUNCS[reduction].reduce(wide(x), axis=axes, dtype=wide(x).dtype, initial=start)
        return narrowed(np.asarray(result), x.dtype)


def _reduce(reduction: ReduceOpType) -> Callable[..., np.ndarray]:
    return lambda x, axes: reduced(x, reduction, axes or tuple(range(x.ndim)))


def _bits(function: np.ufunc) -> Callable[..., np.ndarray]:
    return widened(lambda x, axes: function.reduce(x, axis=axes or tuple(range(x.ndim)), dtype=x.dtype))


def _arg_min_max(x: np.ndarray, axis: int, output_dtype: DType, is_min: bool) -> np.ndarray:
    # NumPy takes the first NaN, else the first of the least.
    return np.asarray((np.argmin if is_min else np.argmax)(wide(x), axis)).astype(output_dtype.numpy)


def windows(
    x: np.ndarray, sizes: Sequence[int], strides: Sequence[int], dilations: Sequence[int] | None = None
) -> np.ndarray:
    """Every window of the leading axes that have an entry in `sizes`: a view with the places of those axes, the other
    axes, and then the axes inside the windows."""
    count = len(sizes)
    dilations = dilations or (1,) * count
    spans = [(size - 1) * dilation + 1 for size, dilation in zip(sizes, dilations, strict=True)]
    places = [
        0 if full < span else (full - span) // stride + 1
        for full, span, stride in zip(x.shape, spans, strides, strict=False)
    ]
    # Nothing is read where there are no places, so a window may be larger than the array.
    shape = (*places, *x.shape[count:], *sizes)
    steps = (
        *(step * stride for step, stride in zip(x.strides, strides, strict=False)),
        *x.strides[count:],
        *(step * dilation for step, dilation in zip(x.strides, dilations, strict=False)),
    )
    return np.lib.stride_tricks.as_strided(x, shape, steps, writeable=False)


def _reduce_window(
    x: np.ndarray,
    reduction_type: ReduceOpType,
    window_dimensions: tuple[int, ...],
    strides: tuple[int, ...],
    base_dilations: tuple[int, ...],
    window_dilations: tuple[int, ...],
    paddings: tuple[tuple[int, int], ...],
) -> np.ndarray:
    start = np.array(neutral(reduction_type, dtype_of(x.dtype))).astype(x.dtype)
    pads = [PadAxis(*ends, dilation - 1) for ends, dilation in zip(paddings, base_dilations, strict=True)]
    found = windows(wide(padded(x, start, pads)), window_dimensions, strides, window_dilations)
    return narrowed(reduced(found, reduction_type, tuple(range(x.ndim, 2 * x.ndim))), x.dtype)


def _elements(
    shape: Sequence[int], places: Sequence[int], window: Sequence[int], strides: Sequence[int], paddings: Sequence
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each element of a window, in order: where it stands in the flat operand, for all windows, and whether it
    is inside."""
    for offsets in itertools.product(*map(range, window)):
        flat, inside = np.zeros(places, np.int64), np.ones(places, bool)
        for axis, (offset, full) in enumerate(zip(offsets, shape, strict=True)):
            index = np.arange(places[axis]) * strides[axis] + offset - paddings[axis][0]
            index = index.reshape(-1, *(1,) * (len(shape) - axis - 1))
            flat = flat * full + index
            inside = inside & (index >= 0) & (index < full)
        yield np.where(inside, flat, 0), inside


def _select_and_scatter(better: np.ufunc) -> Callable[..., np.ndarray]:
    """A window's first element is selected, then each that the selected one is not `better` than or equal to."""

    def scatter(
        operand: np.ndarray,
        source: np.ndarray,
        window_dimensions: tuple[int, ...],
        window_strides: tuple[int, ...],
        paddings: tuple[tuple[int, int], ...],
    ) -> np.ndarray:
        values = operand.reshape(-1)
        chosen, found = np.zeros(source.shape, np.int64), np.zeros(source.shape, bool)
        if values.size:
            for places, inside in _elements(operand.shape, source.shape, window_dimensions, window_strides, paddings):
                taken = inside & ~(found & better(values[chosen], values[places]))
                chosen = np.where(taken, places, chosen)
                found |= inside
        result = np.zeros(values.shape, operand.dtype)
        np.add.at(result, chosen[found], source[found])
        return result.reshape(operand.shape)

    return widened(scatter)


@widened
def _select_and_scatter_sum(
    operand: np.ndarray,
    source: np.ndarray,
    window_dimensions: tuple[int, ...],
    window_strides: tuple[int, ...],
    paddings: tuple[tuple[int, int], ...],
) -> np.ndarray:
    result = np.zeros(math.prod(operand.shape), operand.dtype)
    for places, inside in _elements(operand.shape, source.shape, window_dimensions, window_strides, paddings):
        np.add.at(result, places[inside], source[inside])
    return result.reshape(operand.shape)


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
    OpType.REDUCE_WINDOW: _reduce_window,
    OpType.SELECT_AND_SCATTER_MAX: _select_and_scatter(np.greater_equal),
    OpType.SELECT_AND_SCATTER_MIN: _select_and_scatter(np.less_equal),
    OpType.SELECT_AND_SCATTER_SUM: _select_and_scatter_sum,
}
