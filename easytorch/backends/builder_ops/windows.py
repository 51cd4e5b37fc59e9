"""Reductions of windows, and what scatters back from windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from easytorch.backends.arguments import integers, member
from easytorch.backends.builder_ops.recorder import Closure, Ints, Recorder, or_default, pairs_or_none
from easytorch.backends.shapes import Shape
from easytorch.backends.types import OpType, ReduceOpType

if TYPE_CHECKING:
    from easytorch.backends.graph import Op


_FIRST = "the first of several. Padding is never selected; which element is, where one is NaN, is not defined"


class _SelectAndScatterMethod(Protocol):
    def __call__(
        self,
        operand: Op,
        source: Op,
        window_dimensions: Ints,
        window_strides: Ints | None = None,
        paddings: Sequence[Ints] | None = None,
    ) -> Op: ...


def _select_and_scatter(op_type: OpType, selected: str) -> _SelectAndScatterMethod:
    """The method `op_type`: the three differ in the element that a window selects."""

    def select_and_scatter(
        self: WindowOps,
        operand: Op,
        source: Op,
        window_dimensions: Ints,
        window_strides: Ints | None = None,
        paddings: Sequence[Ints] | None = None,
    ) -> Op:
        return self._add_one(op_type, operand, source, **_windows(window_dimensions, window_strides, paddings))

    select_and_scatter.__name__ = op_type.method
    select_and_scatter.__qualname__ = f"WindowOps.{op_type.method}"
    select_and_scatter.__doc__ = f"""Adds each element of `source` at the place that its window over `operand` selects:
        {selected}.

        See https://openxla.org/stablehlo/spec#select_and_scatter.
        """
    return select_and_scatter  # type: ignore[return-value]


def _windows(window_dimensions: Ints, window_strides: Ints | None, paddings: Sequence[Ints] | None) -> dict[str, Any]:
    """The attributes of windows that are scattered from; strides are the window's own size, paddings 0 if None."""
    window = integers(window_dimensions, "window_dimensions")
    return {
        "window_dimensions": window,
        "window_strides": window if window_strides is None else integers(window_strides, "window_strides"),
        "paddings": pairs_or_none(paddings, len(window)),
    }


class WindowOps(Recorder):
    """A window is given by its sizes along every axis of the operand."""

    def reduce_window(
        self,
        x: Op,
        reduction_type: ReduceOpType,
        window_dimensions: Ints,
        strides: Ints | None = None,
        base_dilations: Ints | None = None,
        window_dilations: Ints | None = None,
        paddings: Sequence[Ints] | None = None,
    ) -> Op:
        """The reduction of every window; strides are the window's own size, dilations 1 and paddings 0 if None."""
        window = integers(window_dimensions, "ReduceWindow: window_dimensions")
        rank = len(window)
        return self._add_one(
            OpType.REDUCE_WINDOW,
            x,
            reduction_type=member(ReduceOpType, reduction_type, "ReduceWindow: reduction_type"),
            window_dimensions=window,
            strides=window if strides is None else integers(strides, "ReduceWindow: strides"),
            base_dilations=or_default(base_dilations, rank, 1, "base_dilations"),
            window_dilations=or_default(window_dilations, rank, 1, "window_dilations"),
            paddings=pairs_or_none(paddings, rank),
        )

    select_and_scatter_max = _select_and_scatter(OpType.SELECT_AND_SCATTER_MAX, f"the maximum, {_FIRST}")
    select_and_scatter_min = _select_and_scatter(OpType.SELECT_AND_SCATTER_MIN, f"the minimum, {_FIRST}")
    select_and_scatter_sum = _select_and_scatter(OpType.SELECT_AND_SCATTER_SUM, "every element")

    def select_and_scatter(
        self,
        operand: Op,
        source: Op,
        init_value: Op,
        select: Closure,
        scatter: Closure,
        window_dimensions: Sequence[int],
        window_strides: Sequence[int] | None = None,
        paddings: Sequence[Sequence[int]] | None = None,
    ) -> Op:
        """Scatters each element of `source` to the position that its window over `operand` selects.

        The output is the scalar `init_value` at first; a position becomes `scatter(current, element)`. A window
        selects its first element, and after it each element for which `select(selected, element)` is false, never
        padding. Both closures take two scalars and capture no other ops. The order of elements that go to one position
        is not defined.
        """
        shape = Shape(self._shapes([operand])[0].dtype)
        return self._add_one(
            OpType.SELECT_AND_SCATTER,
            operand,
            source,
            init_value,
            select=self._closure(select, (shape, shape), "select"),
            scatter=self._closure(scatter, (shape, shape), "scatter"),
            **_windows(window_dimensions, window_strides, paddings),
        )
