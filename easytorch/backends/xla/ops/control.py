"""Control flow with closures. A captured value becomes an operand, or is named directly where the region allows it."""

from __future__ import annotations

from collections.abc import Sequence

from easytorch.backends.graph import Graph
from easytorch.backends.types import OpType
from easytorch.backends.xla.emitter import Emitter, Value
from easytorch.backends.xla.ops import Emit


def _call(e: Emitter, *inputs: Value, function: Graph) -> tuple[Value, ...]:
    return tuple(e.inline(function, inputs))


def _while_loop(e: Emitter, *inputs: Value, cond: Graph, body: Graph) -> tuple[Value, ...]:
    tested, stepped = len(cond.captures), len(body.captures)
    count = len(inputs) - tested - stepped
    shapes = [value.shape for value in inputs]

    def test(*state: Value) -> Sequence[Value]:
        return e.inline(cond, state[: count + tested])

    def step(*state: Value) -> Sequence[Value]:
        # Captured values are carried through the loop unchanged.
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


EMITTERS: dict[OpType, Emit] = {
    OpType.CALL: _call,
    OpType.WHILE_LOOP: _while_loop,
    OpType.COND: _cond,
}
