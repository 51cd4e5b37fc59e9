"""Sorting by a comparator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from easytorch.backends.arguments import integer, truth
from easytorch.backends.builder_ops.recorder import Closure, Recorder
from easytorch.backends.shapes import Shape
from easytorch.backends.types import OpType

if TYPE_CHECKING:
    from easytorch.backends.graph import Op


class SortingOps(Recorder):
    """A comparator is a closure, as those of `ControlOps`."""

    def sort(self, comparator: Closure, axis: int, is_stable: bool, *inputs: Op) -> tuple[Op, ...]:
        """`inputs`, of one size, sorted together along `axis`.

        comparator: given two scalars of each input, (first0, second0, first1, second1, ...), whether the first comes
        before the second.
        """
        scalars = [Shape(shape.dtype) for shape in self._shapes(inputs) for _ in range(2)]
        graph = self._closure(comparator, scalars, "comparator")
        return self._add(
            OpType.SORT,
            *inputs,
            *graph.captures,
            comparator=graph,
            axis=integer(axis, "axis"),
            is_stable=truth(is_stable, "is_stable"),
        )
