"""Reductions of windows, and select-and-scatter."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from easytorch.backends.dtypes import dtype_of
from easytorch.backends.interpreter import BoundClosure
from easytorch.backends.reference.narrow import narrowed, wide, widened
from easytorch.backends.reference.ops.reduction import BLOCK, UFUNCS, neutral
from easytorch.backends.shapeinference.windows import window_sizes
from easytorch.backends.types import OpType, ReduceOpType


def _reduce_window(
    x: np.ndarray,
    reduction_type: ReduceOpType,
    window_dimensions: tuple[int, ...],
    strides: tuple[int, ...],
    base_dilations: tuple[int, ...],
    window_dilations: tuple[int, ...],
    paddings: tuple[tuple[int, int], ...],
) -> np.ndarray:
    """One axis after the other, those that shrink first: no intermediate result is larger than operand and result."""
    start = neutral(reduction_type, dtype_of(x.dtype))
    settings = (window_dimensions, strides, base_dilations, window_dilations, paddings)
    places = window_sizes(x.shape, *settings)
    result = wide(x)
    if 0 in places:
        return np.full(places, start, result.dtype).astype(x.dtype)
    order = sorted(range(x.ndim), key=lambda axis: places[axis] / max(x.shape[axis], 1))
    with np.errstate(all="ignore"):
        for axis in order:
            window = (window_dimensions[axis], strides[axis], base_dilations[axis], window_dilations[axis])
            if window != (1, 1, 1, 1) or any(paddings[axis]):
                lines = np.moveaxis(result, axis, 0)
                reduced_lines = _reduce_lines(
                    lines, UFUNCS[reduction_type], start, places[axis], window, paddings[axis][0]
                )
                result = np.moveaxis(reduced_lines, 0, axis)
        return narrowed(np.ascontiguousarray(result).reshape(places), x.dtype)


def _reduce_lines(
    x: np.ndarray, function: np.ufunc, start: float, places: int, window: tuple[int, int, int, int], padding: int
) -> np.ndarray:
    """Reduces the windows along the first axis; elements that are padding are not read."""
    size, stride, base, dilation = window
    count = x.shape[0]
    if window[1:] == (1, 1, 1) and places == count <= size == padding + 1:
        # All elements up to each.
        return function.accumulate(x, 0, x.dtype)
    result = np.empty((places, *x.shape[1:]), x.dtype)
    fill = np.full((1, *x.shape[1:]), start, x.dtype)
    ended = np.concatenate([x, fill])
    # The offsets of a window that hit elements, not the dilation between them, are `step` apart.
    step = base // math.gcd(base, dilation)
    most = min(-(-size // step), count)
    rest = math.prod(x.shape[1:])
    rows = max(BLOCK // max(most * rest, 1), 1)
    for begin in range(0, places, rows):
        place = np.arange(begin, min(begin + rows, places)) * stride - padding
        first = _first_inside(place, base, dilation, step)
        offsets = first[:, None] + np.arange(most) * step
        spot = place[:, None] + offsets * dilation
        inside = (offsets < size) & (spot >= 0) & (spot <= (count - 1) * base) & (spot % base == 0)
        found = ended[np.where(inside, spot // base, count)]
        result[begin : begin + len(place)] = function.reduce(found, axis=1, dtype=x.dtype, initial=start)
    return result


def _first_inside(place: np.ndarray, base: int, dilation: int, step: int) -> np.ndarray:
    """For windows that begin at `place`: the first offset k with place + k * dilation on or after the first element,
    and a multiple of `base`; some k where there is none."""
    least = np.asarray(np.maximum(-(place // dilation), 0))
    if step == 1:
        return least
    common = math.gcd(base, dilation)
    ahead = (place + least * dilation) // common
    # The product of two large steps overflows 64 bits.
    inverse = pow(dilation // common, -1, step)
    return np.asarray(least + (-(ahead.astype(object) * inverse) % step).astype(np.int64))


def _elements(
    shape: Sequence[int],
    places: Sequence[int],
    window: Sequence[int],
    strides: Sequence[int],
    paddings: Sequence[tuple[int, int]],
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
    """Selects an element of each window: the first, then each later one that the selected one is not `better` than or
    equal to."""

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


def _select_and_scatter_by(
    operand: np.ndarray,
    source: np.ndarray,
    init_value: np.ndarray,
    select: BoundClosure,
    scatter: BoundClosure,
    window_dimensions: tuple[int, ...],
    window_strides: tuple[int, ...],
    paddings: tuple[tuple[int, int], ...],
) -> np.ndarray:
    """The closures are elementwise, so they apply to whole arrays."""
    values = operand.reshape(-1)
    result = np.full(values.shape, init_value, operand.dtype)
    chosen, found = np.zeros(source.shape, np.int64), np.zeros(source.shape, bool)
    if not values.size:
        return result.reshape(operand.shape)
    for places, inside in _elements(operand.shape, source.shape, window_dimensions, window_strides, paddings):
        taken = inside & ~(found & select(values[chosen], values[places])[0])
        chosen = np.where(taken, places, chosen)
        found |= inside
    at, given = chosen[found], source[found]
    while at.size:
        # One update for each position at a time.
        _, first = np.unique(at, return_index=True)
        result[at[first]] = scatter(result[at[first]], given[first])[0]
        at, given = np.delete(at, first), np.delete(given, first)
    return result.reshape(operand.shape)


WINDOWS: dict[OpType, Callable[..., np.ndarray]] = {
    OpType.REDUCE_WINDOW: _reduce_window,
    OpType.SELECT_AND_SCATTER_MAX: _select_and_scatter(np.greater_equal),
    OpType.SELECT_AND_SCATTER_MIN: _select_and_scatter(np.less_equal),
    OpType.SELECT_AND_SCATTER_SUM: _select_and_scatter_sum,
    OpType.SELECT_AND_SCATTER: _select_and_scatter_by,
}
