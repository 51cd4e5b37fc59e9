"""Reductions of windows, and select-and-scatter."""

from __future__ import annotations

import math
from collections.abc import Callable

from easytorch.backends.dtypes import DType
from easytorch.backends.graph import Graph
from easytorch.backends.shapeinference.windows import window_sizes
from easytorch.backends.shapes import Shape
from easytorch.backends.types import OpType, PadAxis, ReduceOpType
from easytorch.backends.xla.emitter import Emitter, Value, int_array, pairs
from easytorch.backends.xla.narrow import narrow, widen, widened
from easytorch.backends.xla.ops import Emit
from easytorch.backends.xla.ops.movement import pad
from easytorch.backends.xla.ops.reduction import COMBINERS, Ints


def _reduce_window(
    e: Emitter,
    x: Value,
    reduction_type: ReduceOpType,
    window_dimensions: Ints,
    strides: Ints,
    base_dilations: Ints,
    window_dilations: Ints,
    paddings: tuple[Ints, ...],
) -> Value:
    if not x.rank:
        return x
    dtype, x = x.dtype, widen(e, x, least=4)
    name, start = COMBINERS[reduction_type]
    region = e.region([Shape(x.dtype)] * 2, lambda a, b: [e.binary(name, a, b)])
    sizes = window_sizes(x.dimensions, window_dimensions, strides, base_dilations, window_dilations, paddings)
    attributes = (
        f"window_dimensions = {int_array(window_dimensions)}, window_strides = {int_array(strides)}, "
        f"base_dilations = {int_array(base_dilations)}, window_dilations = {int_array(window_dilations)}, "
        f"padding = {pairs(paddings)}"
    )
    operands = (x, e.scalar(start(dtype), x.dtype))
    return narrow(e, e.op("reduce_window", operands, Shape(x.dtype, sizes), attributes, region), dtype)


def _select_and_scatter(direction: str) -> Callable[..., Value]:
    def emit(
        e: Emitter,
        operand: Value,
        source: Value,
        window_dimensions: Ints,
        window_strides: Ints,
        paddings: tuple[Ints, ...],
    ) -> Value:
        def better(x0: Value, x1: Value) -> Value:
            return e.compare(direction, x0, x1)

        def added(x0: Value, x1: Value) -> list[Value]:
            return [e.binary("add", x0, x1)]

        settings = (window_dimensions, window_strides, paddings)
        return _scattered(e, operand, source, e.scalar(0, operand.dtype), better, added, settings)

    return widened(emit, least=4)


def _select_and_scatter_by(
    e: Emitter,
    operand: Value,
    source: Value,
    init_value: Value,
    select: Graph,
    scatter: Graph,
    window_dimensions: Ints,
    window_strides: Ints,
    paddings: tuple[Ints, ...],
) -> Value:
    def better(x0: Value, x1: Value) -> Value:
        region = e.region([Shape(x0.dtype)] * 2, lambda a, b: e.inline(select, (a, b)))
        axes = f"dimensions = {int_array(range(x0.rank))}"
        return e.op("map", (x0, x1), x0.shape.with_dtype(DType.BOOL), axes, region)

    def combined(x0: Value, x1: Value) -> list[Value]:
        return e.inline(scatter, (x0, x1))

    settings = (window_dimensions, window_strides, paddings)
    return _scattered(e, operand, source, init_value, better, combined, settings)


def _scattered(
    e: Emitter,
    operand: Value,
    source: Value,
    init_value: Value,
    better: Callable[[Value, Value], Value],
    combine: Callable[[Value, Value], list[Value]],
    settings: tuple[Ints, Ints, tuple[Ints, ...]],
) -> Value:
    """Compares the windows' elements offset by offset: XLA's own operation selects in an unspecified order, and takes
    any of several equal elements."""
    if not operand.rank:
        return combine(init_value, source)[0]
    result = e.broadcast(init_value, (operand.shape.size,), ())
    if source.shape.size and operand.shape.size:
        chosen = _selected_places(e, operand, source.dimensions, better, *settings)
        updates = e.reshape(source, source.shape.size)
        numbers = "inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1"
        region = e.region([Shape(operand.dtype)] * 2, combine)
        attributes = f"scatter_dimension_numbers = #stablehlo.scatter<{numbers}>"
        operands = (result, e.reshape(chosen, source.shape.size, 1), updates)
        result = e.op("scatter", operands, result.shape, attributes, region)
    return e.reshape(result, *operand.dimensions)


def _selected_places(
    e: Emitter,
    operand: Value,
    places: Ints,
    better: Callable[[Value, Value], Value],
    window: Ints,
    strides: Ints,
    paddings: tuple[Ints, ...],
) -> Value:
    """The flat index of each window's selected element, past the end for windows that are all padding."""
    size = operand.shape.size
    counter = DType.INT32 if size < 2**31 else DType.INT64
    config = tuple(PadAxis(*ends) for ends in paddings)
    padded = pad(e, operand, e.full(0, Shape(operand.dtype)), config)
    numbers = e.reshape(e.iota(Shape(counter, (size,)), 0), *operand.dimensions)
    outside = e.scalar(size, counter)
    numbered = pad(e, numbers, outside, config)
    spans = tuple((count - 1) * stride + 1 for count, stride in zip(places, strides, strict=True))

    def at_offset(x: Value, number: Value) -> Value:
        """The element of each window at its `number`-th offset."""
        starts: list[Value] = []
        for axis in reversed(range(x.rank)):
            length = e.scalar(window[axis], DType.INT32)
            starts.insert(0, e.binary("remainder", number, length))
            number = e.binary("divide", number, length)
        block = e.op("dynamic_slice", (x, *starts), Shape(x.dtype, spans), f"slice_sizes = {int_array(spans)}")
        return e.slice(block, (0,) * x.rank, spans, strides)

    def more(number: Value, *_: Value) -> list[Value]:
        return [e.compare("LT", number, e.scalar(math.prod(window), DType.INT32))]

    def step(number: Value, best: Value, chosen: Value, padded: Value, numbered: Value) -> list[Value]:
        element, place = at_offset(padded, number), at_offset(numbered, number)
        nowhere = e.broadcast(outside, places, ())
        found, inside = (e.compare("NE", x, nowhere) for x in (chosen, place))
        taken = e.binary("and", inside, e.unary("not", e.binary("and", found, better(best, element))))
        results = [e.select(taken, element, best), e.select(taken, place, chosen)]
        return [e.binary("add", number, e.scalar(1, DType.INT32)), *results, padded, numbered]

    best = e.full(0, Shape(operand.dtype, places))
    state = (e.scalar(0, DType.INT32), best, e.broadcast(outside, places, ()), padded, numbered)
    shapes = [value.shape for value in state]
    return e.ops("while", state, shapes, "", f"{e.region(shapes, more)}, {e.region(shapes, step)}")[2]


def _scatter_windows(
    e: Emitter,
    operand: Value,
    source: Value,
    window_dimensions: Ints,
    window_strides: Ints,
    paddings: tuple[Ints, ...],
) -> Value:
    """The transpose of a windowed sum: adds up the sources of all windows that an element is in.

    The sources are dilated by the strides, then summed over windows of stride one.
    """
    if not operand.rank:
        return source
    axes = []
    for size, count, window, stride, (low, _) in zip(
        operand.dimensions, source.dimensions, window_dimensions, window_strides, paddings, strict=True
    ):
        spread = (count - 1) * stride + 1 if count else 0
        start = window - 1 - low
        axes.append(PadAxis(start, size + window - 1 - spread - start, stride - 1))
    ones = (1,) * operand.rank
    spread_out = pad(e, source, e.scalar(0, source.dtype), tuple(axes))
    return _reduce_window(
        e, spread_out, ReduceOpType.SUM, window_dimensions, ones, ones, ones, ((0, 0),) * operand.rank
    )


EMITTERS: dict[OpType, Emit] = {
    OpType.REDUCE_WINDOW: _reduce_window,
    OpType.SELECT_AND_SCATTER_MAX: _select_and_scatter("GE"),
    OpType.SELECT_AND_SCATTER_MIN: _select_and_scatter("LE"),
    OpType.SELECT_AND_SCATTER: _select_and_scatter_by,
    OpType.SELECT_AND_SCATTER_SUM: widened(_scatter_windows, least=4),
}
