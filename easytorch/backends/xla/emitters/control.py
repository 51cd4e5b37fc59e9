"""Closures and sorting. What a closure captures is an operand like others, or is named where it stands."""

from __future__ import annotations

from collections.abc import Sequence

from easytorch.backends.errors import OpNotImplementedError
from easytorch.backends.graph import Graph
from easytorch.backends.shapes import Shape
from easytorch.backends.types import OpType
from easytorch.backends.xla.emitter import Emitter, Value
from easytorch.backends.xla.emitters import Emit


def _call(e: Emitter, *inputs: Value, function: Graph) -> tuple[Value, ...]:
    return tuple(e.inline(function, inputs))


def _while_loop(e: Emitter, *inputs: Value, cond: Graph, body: Graph) -> tuple[Value, ...]:
    tested, stepped = len(cond.captures), len(body.captures)
    count = len(inputs) - tested - stepped
    shapes = [value.shape for value in inputs]

    def test(*state: Value) -> Sequence[Value]:
        return e.inline(cond, state[: count + tested])

    def step(*state: Value) -> Sequence[Value]:
        # The captures go round the loop unchanged.
        return [*e.inline(body, (*state[:count], *state[count + tested :])), *state[count:]]

    regions = f"{e.region(shapes, test)}, {e.region(shapes, step)}"
    return e.ops("while", inputs, shapes, "", regions)[:count]


def _cond(e: Emitter, pred: Value, *captures: Value, true_branch: Graph, false_branch: Graph) -> tuple[Value, ...]:
    count = len(true_branch.captures)
    regions = ", ".join(
        (
            e.region([], lambda: e.inline(true_branch, captures[:count])),
            e.region([], lambda: e.inline(false_branch, captures[count:])),
        )
    )
    return e.ops("if", (pred,), true_branch.output_shapes, "", regions)


def _sort(e: Emitter, *inputs: Value, comparator: Graph, axis: int, is_stable: bool) -> tuple[Value, ...]:
    count = len(inputs) - len(comparator.captures)
    operands, captures = inputs[:count], inputs[count:]
    dimensions = operands[0].dimensions
    if any(capture.rank for capture in captures):
        given = ", ".join(str(capture.shape) for capture in captures)
        raise OpNotImplementedError(
            f"Sort: the comparator uses arrays of the computation around it ({given}); on XLA these must be scalars"
        )
    # A comparator of XLA sees nothing but its operands: the scalars it captures are sorted with them.
    everything = [*operands, *(e.broadcast(capture, dimensions, ()) for capture in captures)]

    def compare(*scalars: Value) -> Sequence[Value]:
        return e.inline(comparator, (*scalars[: 2 * count], *scalars[2 * count :: 2]))

    region = e.region([Shape(value.dtype) for value in everything for _ in range(2)], compare)
    attributes = f"dimension = {axis} : i64, is_stable = {'true' if is_stable else 'false'}"
    return e.ops("sort", everything, [value.shape for value in everything], attributes, region)[:count]


EMITTERS: dict[OpType, Emit] = {
    OpType.CALL: _call,
    OpType.WHILE_LOOP: _while_loop,
    OpType.COND: _cond,
    OpType.SORT: _sort,
}
