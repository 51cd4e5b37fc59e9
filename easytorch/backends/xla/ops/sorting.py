"""Sorting by a comparator. A captured value is sorted along, or the ranks are found by comparing all pairs."""

from __future__ import annotations

from collections.abc import Sequence

from easytorch.backends.dtypes import DType
from easytorch.backends.graph import Graph
from easytorch.backends.shapes import Shape
from easytorch.backends.types import OpType
from easytorch.backends.xla.emitter import Emitter, Value
from easytorch.backends.xla.ops import Emit, elementwise
from easytorch.backends.xla.ops.movement import transpose


def _sort(e: Emitter, *inputs: Value, comparator: Graph, axis: int, is_stable: bool) -> tuple[Value, ...]:
    count = len(inputs) - len(comparator.captures)
    operands, captures = inputs[:count], inputs[count:]
    dimensions = operands[0].dimensions
    if 0 in dimensions:
        return tuple(operands)
    if any(capture.rank for capture in captures) or not _is_pointwise(comparator):
        ranks = _ranks(e, operands, captures, comparator, axis)
        return _sort_by(e, ranks, operands, axis)
    # An XLA comparator sees only its operands, so captured scalars are sorted along with them.
    everything = [*operands, *(e.broadcast(capture, dimensions, ()) for capture in captures)]

    def compare(*scalars: Value) -> Sequence[Value]:
        return e.inline(comparator, (*scalars[: 2 * count], *scalars[2 * count :: 2]))

    region = e.region([Shape(value.dtype) for value in everything for _ in range(2)], compare)
    attributes = f"dimension = {axis} : i64, is_stable = {'true' if is_stable else 'false'}"
    return e.ops("sort", everything, [value.shape for value in everything], attributes, region)[:count]


def _is_pointwise(comparator: Graph) -> bool:
    """Whether XLA can compile it inside a sort: anything but scalars and elementwise operations aborts the process."""
    return all(node.op_type in _POINTWISE and not any(s.rank for s in node.shapes) for node in comparator.nodes)


def _sort_by(e: Emitter, ranks: Value, operands: Sequence[Value], axis: int) -> tuple[Value, ...]:
    everything = (ranks, *operands)
    scalars = [Shape(value.dtype) for value in everything for _ in range(2)]
    region = e.region(scalars, lambda one, other, *_: [e.compare("LT", one, other)])
    shapes = [value.shape for value in everything]
    return e.ops("sort", everything, shapes, f"dimension = {axis} : i64, is_stable = true", region)[1:]


def _ranks(e: Emitter, operands: Sequence[Value], captures: Sequence[Value], comparator: Graph, axis: int) -> Value:
    """The rank of each element in the stable order along `axis`, found by comparing all pairs, one after the other."""
    dimensions = operands[0].dimensions
    count, total = dimensions[axis], operands[0].shape.size
    lines = total // count
    order = (*(other for other in range(len(dimensions)) if other != axis), axis)
    flat = [e.reshape(transpose(e, operand, order), total) for operand in operands]
    pairs = Shape(DType.BOOL, (lines * count * count,))
    one = e.scalar(1, DType.INT32)
    columns = e.scalar(count, DType.INT32)

    def more(number: Value, *_: Value) -> list[Value]:
        return [e.compare("LT", number, e.scalar(pairs.size, DType.INT32))]

    def step(number: Value, found: Value, *rest: Value) -> list[Value]:
        values, captured = rest[: len(flat)], rest[len(flat) :]
        row = e.binary("divide", number, columns)
        line = e.binary("multiply", e.binary("divide", row, columns), columns)
        places = (row, e.binary("add", line, e.binary("remainder", number, columns)))
        given = [
            e.reshape(e.op("dynamic_slice", (value, place), Shape(value.dtype, (1,)), "slice_sizes = array<i64: 1>"))
            for value in values
            for place in places
        ]
        (before,) = e.inline(comparator, (*given, *captured))
        written = e.op("dynamic_update_slice", (found, e.reshape(before, 1), number), found.shape)
        return [e.binary("add", number, one), written, *rest]

    state = (e.scalar(0, DType.INT32), e.full(0, pairs), *flat, *captures)
    shapes = [value.shape for value in state]
    found = e.ops("while", state, shapes, "", f"{e.region(shapes, more)}, {e.region(shapes, step)}")[1]
    table = e.reshape(found, lines, count, count)
    one_place, other_place = (e.iota(Shape(DType.INT32, table.dimensions), which) for which in (1, 2))
    earlier = e.compare("LT", one_place, other_place)
    tied = e.binary("and", e.unary("not", transpose(e, table, (0, 2, 1))), earlier)
    ahead = e.convert(e.binary("or", table, tied), DType.INT32)
    ranks = e.reshape(e.reduce("add", ahead, 0, (1,)), *(dimensions[other] for other in order))
    return transpose(e, ranks, tuple(order.index(other) for other in range(len(order))))


# Integer powers are a loop, and bitcasts of narrow or complex numbers concatenate pieces.
_POINTWISE = {OpType.PARAMETER, OpType.CONSTANT, OpType.CONVERT_DTYPE, *elementwise.EMITTERS} - {OpType.POW}


EMITTERS: dict[OpType, Emit] = {
    OpType.SORT: _sort,
}
