"""Sorting by any comparator: a vectorized merge sort, where every element finds its position in the other run by
bisection."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from easytorch.backends.interpreter import BoundClosure
from easytorch.backends.reference.ops.elementwise import ELEMENTWISE
from easytorch.backends.types import OpType

# Operations that work elementwise on arrays, where scalars broadcast.
_POINTWISE = frozenset(ELEMENTWISE) - {OpType.BITCAST} | {OpType.PARAMETER, OpType.CONSTANT}
# (lines, n) indices of elements, and of others -> whether each comes before its other.
Before = Callable[[np.ndarray, np.ndarray], np.ndarray]


def _sort(*operands: np.ndarray, comparator: BoundClosure, axis: int, is_stable: bool) -> tuple[np.ndarray, ...]:
    lines = [np.moveaxis(operand, axis, -1) for operand in operands]
    flat = [line.reshape(-1, line.shape[-1]) if line.size else line for line in lines]
    if not operands[0].size:
        return operands
    compare = _compare_arrays if _is_pointwise(comparator) else _compare_scalars

    def before(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        pairs = [np.take_along_axis(line, indices, 1) for line in flat for indices in (one, other)]
        return compare(comparator, pairs)

    order = merge_order(flat[0].shape, before)
    return tuple(
        np.moveaxis(np.take_along_axis(one, order, 1).reshape(line.shape), -1, axis)
        for one, line in zip(flat, lines, strict=True)
    )


def merge_order(shape: tuple[int, int], before: Before) -> np.ndarray:
    """The stable order of each of `shape[0]` lines of `shape[1]` elements, O(log(n)^2) calls of `before`."""
    count = shape[1]
    order = np.broadcast_to(np.arange(count), shape)
    width = 1
    while width < count:
        place = np.arange(count)
        run = place // width
        is_left = run % 2 == 0
        # Each element searches its position in the neighbouring run.
        other = np.where(is_left, run + 1, run - 1) * width
        low = np.broadcast_to(np.minimum(other, count), shape).copy()
        high = np.broadcast_to(np.minimum(other + width, count), shape).copy()
        start = low.copy()
        while (low < high).any():
            middle = (low + high) // 2
            open_ = low < high
            candidate = np.take_along_axis(order, np.minimum(middle, count - 1), 1)
            # Among equal elements, those of the left run come first.
            earlier = np.where(is_left, before(candidate, order), ~before(order, candidate))
            low = np.where(open_ & earlier, middle + 1, low)
            high = np.where(open_ & ~earlier, middle, high)
        target = place - run * width + (low - start) + run // 2 * 2 * width
        merged = np.empty(shape, order.dtype)
        np.put_along_axis(merged, target, order, 1)
        order = merged
        width *= 2
    return order


def _is_pointwise(comparator: BoundClosure) -> bool:
    return all(node.op_type in _POINTWISE for node in comparator.graph.nodes)


def _compare_arrays(comparator: BoundClosure, pairs: Sequence[np.ndarray]) -> np.ndarray:
    return np.broadcast_to(comparator(*pairs)[0], pairs[0].shape)


def _compare_scalars(comparator: BoundClosure, pairs: Sequence[np.ndarray]) -> np.ndarray:
    result = np.empty(pairs[0].shape, bool)
    for place in np.ndindex(*result.shape):
        (result[place],) = comparator(*(np.asarray(values[place]) for values in pairs))
    return result


SORTING: dict[OpType, Callable[..., tuple[np.ndarray, ...]]] = {OpType.SORT: _sort}
