"""Control flow with closures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from easytorch.backends.builder_ops.recorder import Closure, Recorder
from easytorch.backends.types import OpType

if TYPE_CHECKING:
    from easytorch.backends.graph import Op


class ControlOps(Recorder):
    """A closure is a Python function `(builder, *ops) -> op or tuple of ops` over a builder of its own."""

    def call(self, function: Closure, *inputs: Op) -> tuple[Op, ...]:
        """The closure traced with `inputs`, as a function of the graph."""
        graph = self._closure(function, self._shapes(inputs), "call")
        return self._add(OpType.CALL, *inputs, *graph.captures, function=graph)

    def while_loop(self, cond: Closure, body: Closure, *initial_state: Op) -> tuple[Op, ...]:
        """The state after applying `body` as long as `cond` gives a true scalar for it."""
        shapes = self._shapes(initial_state)
        test, step = self._closure(cond, shapes, "cond"), self._closure(body, shapes, "body")
        return self._add(OpType.WHILE_LOOP, *initial_state, *test.captures, *step.captures, cond=test, body=step)

    def cond(self, pred: Op, true_branch: Closure, false_branch: Closure) -> tuple[Op, ...]:
        """The outputs of `true_branch` if the bool scalar `pred` is True, else of `false_branch`."""
        first, second = self._closure(true_branch, (), "true_branch"), self._closure(false_branch, (), "false_branch")
        return self._add(OpType.COND, pred, *first.captures, *second.captures, true_branch=first, false_branch=second)
