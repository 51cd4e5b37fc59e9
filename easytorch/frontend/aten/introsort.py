"""The order of equal elements after ATen's sorts on a CPU, which use C++'s unstable algorithms.

`topk` is `std::nth_element` and `std::sort`, or `std::partial_sort` of a few of many; `sort` is `std::sort`. Their
order of equal elements is that of libstdc++ (bits/stl_algo.h, bits/stl_heap.h): partitioning around the median of three
does not depend on the order of segments, so here all segments of all rows are partitioned at once, in as many rounds as
there are levels. The heap sort that libstdc++ falls back to after 2 log2(n) levels (adversarial inputs) is left out.

Everything is a vector of int32: `rank` is the place of an element among those of its row, the same for equal ones, and
`where` the element it was. Segments are (first place, place after the last).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from easytorch.backends.builder import Builder
from easytorch.backends.dtypes import DType
from easytorch.backends.graph import Op
from easytorch.backends.shapes import Shape
from easytorch.backends.types import PadAxis

# Segments as short as this are left to insertion sort, which is stable: by std::sort, and by std::nth_element.
_SHORT, _SHORTEST = 16, 3
# ATen takes std::partial_sort where the row has so many times as many elements.
_FEW = 64


class _Segments(NamedTuple):
    rank: Op
    where: Op
    start: Op
    end: Op


def sort_order(b: Builder, rank: Op) -> Op:
    """(rows, n) int32 ranks -> (rows, n) int32: the elements in the order of `std::sort`."""
    segments = _partitioned(b, _rows(b, rank), _SHORT, None)
    return _settled(b, segments, rank.shape.dimensions[0]).where


def topk_order(b: Builder, rank: Op, k: int, ordered: bool) -> Op:
    """(rows, n) int32 ranks -> (rows, k) int32: the elements that `topk` takes, in its order. 0 < k <= n."""
    rows, count = rank.shape.dimensions
    if k * _FEW <= count:
        return _partial_sort(b, rank, k)
    whole = _rows(b, rank)
    last = b.add(whole.start, _number(b, k - 1))
    selected = _settled(b, _partitioned(b, whole, _SHORTEST, last), rows)
    if ordered:
        places = b.iota(last.shape, 0)
        inside = b.less_than(places, last)
        start, end = b.where(inside, whole.start, places), b.where(inside, last, b.add(places, _number(b, 1)))
        flat = _Segments(_flat(b, selected.rank), _flat(b, selected.where), start, end)
        selected = _settled(b, _partitioned(b, flat, _SHORT, None) if k - 1 > _SHORT else flat, rows)
    return b.slice(selected.where, (0, 0), (rows, k))


def _rows(b: Builder, rank: Op) -> _Segments:
    """A segment for each row of (rows, n) ranks."""
    count = rank.shape.dimensions[1]
    start = b.mul(_flat(b, b.iota(rank.shape, 0)), _number(b, count))
    return _Segments(_flat(b, rank), _flat(b, b.iota(rank.shape, 1)), start, b.add(start, _number(b, count)))


def _settled(b: Builder, segments: _Segments, rows: int) -> _Segments:
    """Every segment by insertion sort, which is stable. Parts are (rows, n)."""

    def before(inner: Builder, s0: Op, s1: Op, r0: Op, r1: Op, *rest: Op) -> Op:
        earlier = inner.less_than(s0, s1)
        return inner.logical_or(earlier, inner.logical_and(inner.equal(s0, s1), inner.less_than(r0, r1)))

    start, rank, where, end = (
        b.reshape(part, rows, part.shape.size // rows)
        for part in (segments.start, segments.rank, segments.where, segments.end)
    )
    start, rank, where = b.sort(before, 1, True, start, rank, where)
    return _Segments(rank, where, start, end)


def _partitioned(b: Builder, segments: _Segments, limit: int, nth: Op | None) -> _Segments:
    """Segments of more than `limit` elements partitioned until none is left; of a row only that of `nth`, if given."""

    def longer(inner: Builder, rank: Op, where: Op, start: Op, end: Op) -> Op:
        return inner.reduce_logical_or(inner.greater_than(inner.sub(end, start), _number(inner, limit)))

    def step(inner: Builder, *parts: Op) -> tuple[Op, ...]:
        return _partition(inner, _Segments(*parts), limit, nth)

    return _Segments(*b.while_loop(longer, step, *segments))


def _partition(b: Builder, segments: _Segments, limit: int, nth: Op | None) -> _Segments:
    """`std::__unguarded_partition_pivot` of every segment of more than `limit` elements.

    Its two scans stop at elements not before the pivot, from the left, and not after it, from the right, and the i-th
    of the one are swapped with the i-th of the other until they meet: so by counting the stops, none is a loop.
    """
    rank, where, first, last = segments
    count = rank.shape.size
    place, one = b.iota(rank.shape, 0), _number(b, 1)
    size = b.sub(last, first)
    active = b.greater_than(size, _number(b, limit))
    # The median of three goes to the front: std::__move_median_to_first.
    second, middle, final = b.add(first, one), b.add(first, b.div(size, _number(b, 2))), b.sub(last, one)
    r0, r1, r2 = (_at(b, rank, at) for at in (second, middle, final))
    r01, r12, r02 = b.less_than(r0, r1), b.less_than(r1, r2), b.less_than(r0, r2)
    pivot_place = b.where(
        r01,
        b.where(r12, middle, b.where(r02, final, second)),
        b.where(r02, second, b.where(r12, final, middle)),
    )
    at_first = b.equal(place, first)
    source = b.where(at_first, pivot_place, b.where(b.equal(place, pivot_place), first, place))
    source = b.where(active, source, place)
    rank, where = _at(b, rank, source), _at(b, where, source)
    pivot = _at(b, rank, first)
    inside = b.logical_and(active, b.logical_not(at_first))
    left = b.logical_and(inside, b.greater_or_equal(rank, pivot))
    right = b.logical_and(inside, b.less_or_equal(rank, pivot))
    lefts, rights = _counted(b, left), _counted(b, right)
    before = b.sub(b.sub(lefts, b.convert_dtype(left, DType.INT32)), _at(b, lefts, first))
    after = b.sub(_at(b, rights, final), rights)
    goes_right = b.logical_and(left, b.greater_than(after, before))
    goes_left = b.logical_and(right, b.greater_than(before, after))
    # The i-th swap of a segment is written down at its i-th place.
    left_slot, right_slot = b.add(first, before), b.add(first, after)
    nowhere = _number(b, count)
    left_places = _put(b, b.where(goes_right, left_slot, nowhere), place)
    right_places = _put(b, b.where(goes_left, right_slot, nowhere), place)
    source = b.where(
        goes_right, _at(b, right_places, left_slot), b.where(goes_left, _at(b, left_places, right_slot), place)
    )
    rank, where = _at(b, rank, source), _at(b, where, source)
    # The left scan's last stop: one that was not swapped, or the leftmost that a swap put there.
    stops = _counted(b, b.logical_or(b.logical_and(left, b.logical_not(goes_right)), goes_left))
    passed = _counted(b, b.equal(b.sub(stops, _at(b, stops, first)), _number(b, 0)))
    cut = b.add(second, b.sub(_at(b, passed, final), _at(b, passed, first)))
    lower = b.less_than(place, cut)
    start, end = b.where(lower, first, cut), b.where(lower, cut, last)
    if nth is not None:
        chosen = b.equal(lower, b.less_than(nth, cut))
        start, end = b.where(chosen, start, place), b.where(chosen, end, b.add(place, one))
    return _Segments(rank, where, b.where(active, start, first), b.where(active, end, last))


def _partial_sort(b: Builder, rank: Op, k: int) -> Op:
    """`std::partial_sort`: the first k as a heap, into which each further element goes that is before its top, then
    taken out of it one after the other. (rows, k)"""
    rows, count = rank.shape.dimensions
    heap = _Heap(rows, k)
    state: tuple[Op, ...] = (
        _flat(b, b.slice(rank, (0, 0), (rows, k))),
        _flat(b, b.iota(Shape(DType.INT32, (rows, k)), 1)),
    )
    everywhere = b.broadcast(b.constant(np.bool_(True)), rows)
    for parent in range((k - 2) // 2, -1, -1):
        hole = b.broadcast(_number(b, parent), rows)
        value = tuple(_at(b, part, heap.place(b, hole)) for part in state)
        state = heap.adjusted(b, state, hole, _number(b, k), value, everywhere)

    def more(inner: Builder, number: Op, *parts: Op) -> Op:
        return inner.less_than(number, _number(inner, count))

    def offered(inner: Builder, number: Op, *parts: Op) -> tuple[Op, ...]:
        column = inner.dynamic_slice(rank, (_number(inner, 0), number), (rows, 1))
        value = inner.reshape(column, rows), inner.broadcast(number, rows)
        top = inner.broadcast(_number(inner, 0), rows)
        better = inner.less_than(value[0], _at(inner, parts[0], heap.place(inner, top)))
        found = heap.adjusted(inner, parts, top, _number(inner, k), value, better)
        return inner.add(number, _number(inner, 1)), *found

    _, *state_ = b.while_loop(more, offered, _number(b, k), *state)

    def left(inner: Builder, length: Op, *parts: Op) -> Op:
        return inner.greater_than(length, _number(inner, 1))

    def popped(inner: Builder, length: Op, *parts: Op) -> tuple[Op, ...]:
        end = inner.sub(length, _number(inner, 1))
        top, last = inner.broadcast(_number(inner, 0), rows), inner.broadcast(end, rows)
        value = tuple(_at(inner, part, heap.place(inner, last)) for part in parts)
        always = inner.broadcast(inner.constant(np.bool_(True)), rows)
        freed = tuple(
            heap.written(inner, part, last, _at(inner, part, heap.place(inner, top)), always) for part in parts
        )
        return end, *heap.adjusted(inner, freed, top, end, value, always)

    _, _, where = b.while_loop(left, popped, _number(b, k), *state_)
    return b.reshape(where, rows, k)


class _Heap:
    """A heap of k elements a row, the last in order on top; (rows * k,) ranks and elements."""

    def __init__(self, rows: int, k: int) -> None:
        self.rows, self.k = rows, k

    def place(self, b: Builder, at: Op) -> Op:
        """(rows,) places in each heap -> places in the vector."""
        return b.add(b.mul(b.iota(at.shape, 0), _number(b, self.k)), at)

    def written(self, b: Builder, x: Op, at: Op, value: Op, where: Op) -> Op:
        """x with `value` at a place of each row's heap, in the rows `where`."""
        rows = Shape(DType.INT32, (self.rows, self.k))
        table = b.reshape(x, self.rows, self.k)
        here = b.equal(b.iota(rows, 1), b.broadcast_in_dim(at, rows, (0,)))
        chosen = b.logical_and(here, b.broadcast_in_dim(where, rows.with_dtype(DType.BOOL), (0,)))
        return _flat(b, b.where(chosen, b.broadcast_in_dim(value, rows, (0,)), table))

    def adjusted(
        self, b: Builder, state: tuple[Op, ...], top: Op, length: Op, value: tuple[Op, ...], where: Op
    ) -> tuple[Op, ...]:
        """`std::__adjust_heap`: the hole at `top` sinks to a leaf by the greater children, then `value` rises in it."""
        one, two = _number(b, 1), _number(b, 2)
        hole = top
        half = b.div(b.sub(length, one), two)
        for _ in range(self.k.bit_length()):
            child = b.mul(two, b.add(hole, one))
            ranks = [_at(b, state[0], self.place(b, at)) for at in (child, b.sub(child, one))]
            child = b.where(b.less_than(*ranks), b.sub(child, one), child)
            state, hole = self._moved(b, state, hole, child, b.logical_and(where, b.less_than(hole, half)))
        # A last parent with one child.
        even = b.equal(b.rem(length, two), _number(b, 0))
        lonely = b.logical_and(even, b.equal(hole, b.div(b.sub(length, two), two)))
        child = b.add(b.mul(two, hole), one)
        state, hole = self._moved(b, state, hole, child, b.logical_and(where, lonely))
        rising = where
        for _ in range(self.k.bit_length()):
            parent = b.div(b.sub(hole, one), two)
            less = b.less_than(_at(b, state[0], self.place(b, parent)), value[0])
            rising = b.logical_and(rising, b.logical_and(b.greater_than(hole, top), less))
            state, hole = self._moved(b, state, hole, parent, rising)
        return tuple(self.written(b, part, hole, new, where) for part, new in zip(state, value, strict=True))

    def _moved(self, b: Builder, state: tuple[Op, ...], hole: Op, at: Op, where: Op) -> tuple[tuple[Op, ...], Op]:
        """The element at `at` in the hole, and the hole there, in the rows `where`."""
        moved = tuple(self.written(b, part, hole, _at(b, part, self.place(b, at)), where) for part in state)
        return moved, b.where(where, at, hole)


def _number(b: Builder, value: int) -> Op:
    return b.constant(np.int32(value))


def _flat(b: Builder, x: Op) -> Op:
    return b.reshape(x, x.shape.size)


def _at(b: Builder, x: Op, places: Op) -> Op:
    """The elements at `places`, which are clamped to the bounds."""
    return b.gather(x, places, 1, (), (0,), (0,), (1,))


def _put(b: Builder, places: Op, values: Op) -> Op:
    """A vector with `values` at `places` and zeros elsewhere; places are unique, those out of bounds dropped."""
    zeros = b.broadcast(_number(b, 0), *values.shape.dimensions)
    return b.scatter_sum(zeros, places, values, 1, (), (0,), (0,))


def _counted(b: Builder, flags: Op) -> Op:
    """The number of true flags up to and including each element."""
    return running_sum(b, b.convert_dtype(flags, DType.INT32), 0)


def running_sum(b: Builder, x: Op, axis: int) -> Op:
    """The sum of all int32 up to each along `axis`, by as many steps as the length has bits."""
    step = 1
    while step < x.shape.dimensions[axis]:
        x = b.add(x, b.pad(x, _number(b, 0), *[PadAxis()] * axis, PadAxis(step, -step)))
        step *= 2
    return x
