"""Control flow with closures."""

from __future__ import annotations

from collections.abc import Sequence

from easytorch.backends.dtypes import DType
from easytorch.backends.errors import BackendError
from easytorch.backends.graph import Graph
from easytorch.backends.shapeinference.rule import Rule, takes
from easytorch.backends.shapes import Shape
from easytorch.backends.types import OpType

TRUTH = (Shape(DType.BOOL),)


def _call(*inputs: Shape, function: Graph) -> tuple[Shape, ...]:
    _takes(function, inputs)
    return function.output_shapes


def _while(*inputs: Shape, cond: Graph, body: Graph) -> tuple[Shape, ...]:
    state = inputs[: len(inputs) - len(cond.captures) - len(body.captures)]
    if not state:
        raise BackendError("a loop needs at least one state operand")
    if cond.output_shapes != TRUTH:
        raise BackendError(f"the condition returns {listed(cond.output_shapes)}; it must return one bool scalar")
    if body.output_shapes != state:
        raise BackendError(
            f"the body returns {listed(body.output_shapes)}; it must return the shapes of the state, {listed(state)}"
        )
    return state


@takes((DType.BOOL,), "the condition must be a bool scalar")
def _cond(pred: Shape, *captures: Shape, true_branch: Graph, false_branch: Graph) -> tuple[Shape, ...]:
    if (pred,) != TRUTH:
        raise BackendError("the condition must be a bool scalar")
    one, other = true_branch.output_shapes, false_branch.output_shapes
    if one != other:
        raise BackendError(f"the branches return {listed(one)} and {listed(other)}; they must return the same shapes")
    return one


def _takes(graph: Graph, inputs: Sequence[Shape]) -> None:
    if tuple(inputs) != graph.parameter_shapes:
        raise BackendError(f"the closure takes {listed(graph.parameter_shapes)}, and is given {listed(inputs)}")


def listed(shapes: Sequence[Shape]) -> str:
    return ", ".join(map(str, shapes)) or "nothing"


RULES: dict[OpType, Rule] = {
    OpType.CALL: _call,
    OpType.WHILE_LOOP: _while,
    OpType.COND: _cond,
}
