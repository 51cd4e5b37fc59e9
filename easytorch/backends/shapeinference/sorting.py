"""Sorting by a comparator."""

from __future__ import annotations

from easytorch.backends.errors import BackendError
from easytorch.backends.graph import Graph
from easytorch.backends.shapeinference.control import TRUTH, listed
from easytorch.backends.shapeinference.rule import Rule, require_axis
from easytorch.backends.shapes import Shape
from easytorch.backends.types import OpType


def _sort(*inputs: Shape, comparator: Graph, axis: int, is_stable: bool) -> tuple[Shape, ...]:
    operands = inputs[: len(inputs) - len(comparator.captures)]
    if not operands or len({shape.dimensions for shape in operands}) > 1:
        raise BackendError("operands that are sorted together must have the same dimensions")
    require_axis(operands[0], axis)
    if comparator.output_shapes != TRUTH:
        raise BackendError(f"the comparator returns {listed(comparator.output_shapes)}; it must return one bool scalar")
    return operands


RULES: dict[OpType, Rule] = {
    OpType.SORT: _sort,
}
