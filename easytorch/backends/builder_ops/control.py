"""Control flow with closures, and sorting by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from easytorch.backends.arguments import integer, truth
from easytorch.backends.builder_ops.recorder import Closure, Recorder
from easytorch.backends.shapes import Shape
from easytorch.backends.types import OpType

if TYPE_CHECKING:
    from easytorch.backends.graph import Op


class ControlOps(Recorder):
    """A closure is a Python function `(builder, *ops) -> op or tuple of ops` over a builder of its own."""

    def call(self, function: Closure, *inputs: Op) -> tuple[Op, ...]:
        """What the closure gives for `inputs`, as a function of its own."""
        graph = self._closure(function, self._shapes(inputs), "call")
        return self._add(OpType.CALL, *inputs, *graph.captures, function=graph)

    def while_loop(self, cond: Closure, body: Closure, *initial_state: Op) -> tuple[Op, ...]:
        """The state after applying `body` as long as `cond` gives a true scalar for it."""
        shapes = self._shapes(initial_state)
        test, step = self._closure(cond, shapes, "cond"), self._closure(body, shapes, "body")
        return self._add(OpType.WHILE_LOOP, *initial_state, *test.captures, *step.captures, cond=test, body=step)

    def cond(self, pred: Op, true_branch: Closure, false_branch: Closure) -> tuple[Op, ...]:
        """What one of two closures without arguments gives: the first if the bool scalar holds."""
        first, second = self._closure(true_branch, (), "true_branch"), self._closure(false_branch, (), "false_branch")
        return self._add(OpType.COND, pred, *first.captures, *second.captures, true_branch=first, false_branch=second)

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
