"""Gather and scatter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from easytorch.backends.arguments import integer, integers, truth
from easytorch.backends.builder_ops.recorder import Ints, Recorder
from easytorch.backends.types import OpType

if TYPE_CHECKING:
    from easytorch.backends.graph import Op


class _ScatterMethod(Protocol):
    def __call__(
        self,
        operand: Op,
        scatter_indices: Op,
        updates: Op,
        index_vector_axis: int,
        update_window_axes: Ints,
        inserted_window_axes: Ints,
        scatter_axes_to_operand_axes: Ints,
        indices_are_sorted: bool = False,
        unique_indices: bool = False,
    ) -> Op: ...


def _scatter(op_type: OpType, rule: str) -> _ScatterMethod:
    """The method that adds a scatter; they differ in what becomes of two values at one place."""

    def scatter(
        self: IndexingOps,
        operand: Op,
        scatter_indices: Op,
        updates: Op,
        index_vector_axis: int,
        update_window_axes: Ints,
        inserted_window_axes: Ints,
        scatter_axes_to_operand_axes: Ints,
        indices_are_sorted: bool = False,
        unique_indices: bool = False,
    ) -> Op:
        return self._add_one(
            op_type,
            operand,
            scatter_indices,
            updates,
            index_vector_axis=integer(index_vector_axis, "index_vector_axis"),
            update_window_axes=integers(update_window_axes, "update_window_axes"),
            inserted_window_axes=integers(inserted_window_axes, "inserted_window_axes"),
            scatter_axes_to_operand_axes=integers(scatter_axes_to_operand_axes, "scatter_axes_to_operand_axes"),
            indices_are_sorted=truth(indices_are_sorted, "indices_are_sorted"),
            unique_indices=truth(unique_indices, "unique_indices"),
        )

    scatter.__name__ = op_type.method
    scatter.__qualname__ = f"IndexingOps.{op_type.method}"
    scatter.__doc__ = f"""operand with `updates` at the index vectors of `scatter_indices`: {rule}.

        A slice partly outside is left out. See https://openxla.org/stablehlo/spec#scatter.
        """
    return scatter  # type: ignore[return-value]


class IndexingOps(Recorder):
    """Index vectors are rows of an array of integers."""

    def gather(
        self,
        operand: Op,
        start_indices: Op,
        index_vector_axis: int,
        offset_output_axes: Ints,
        collapsed_slice_axes: Ints,
        start_index_map: Ints,
        slice_sizes: Ints,
        indices_are_sorted: bool = False,
    ) -> Op:
        """Slices of `slice_sizes` at the index vectors of `start_indices`, clamped so that all are inside.

        See https://openxla.org/stablehlo/spec#gather.
        """
        return self._add_one(
            OpType.GATHER,
            operand,
            start_indices,
            index_vector_axis=integer(index_vector_axis, "index_vector_axis"),
            offset_output_axes=integers(offset_output_axes, "offset_output_axes"),
            collapsed_slice_axes=integers(collapsed_slice_axes, "collapsed_slice_axes"),
            start_index_map=integers(start_index_map, "start_index_map"),
            slice_sizes=integers(slice_sizes, "slice_sizes"),
            indices_are_sorted=truth(indices_are_sorted, "indices_are_sorted"),
        )

    scatter_max = _scatter(OpType.SCATTER_MAX, "the greater stays")
    scatter_min = _scatter(OpType.SCATTER_MIN, "the less stays")
    scatter_sum = _scatter(OpType.SCATTER_SUM, "they are added")
    scatter_set = _scatter(
        OpType.SCATTER_SET, "they replace what is there; which of several at one place does is not defined"
    )
    scatter_multiply = _scatter(OpType.SCATTER_MULTIPLY, "they are multiplied")
