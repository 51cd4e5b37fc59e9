"""Gather and scatter."""

from __future__ import annotations

from collections.abc import Callable

from easytorch.backends.dtypes import DType, highest, lowest
from easytorch.backends.shapeinference import infer
from easytorch.backends.shapes import Shape
from easytorch.backends.types import OpType
from easytorch.backends.xla.emitter import Emitter, Value, int_array
from easytorch.backends.xla.narrow import narrow, widen
from easytorch.backends.xla.ops import Emit
from easytorch.backends.xla.ops.movement import index

Ints = tuple[int, ...]


def _gather(
    e: Emitter,
    operand: Value,
    start_indices: Value,
    index_vector_axis: int,
    offset_output_axes: Ints,
    collapsed_slice_axes: Ints,
    start_index_map: Ints,
    slice_sizes: Ints,
    indices_are_sorted: bool,
) -> Value:
    settings = {
        "index_vector_axis": index_vector_axis,
        "offset_output_axes": offset_output_axes,
        "collapsed_slice_axes": collapsed_slice_axes,
        "start_index_map": start_index_map,
        "slice_sizes": slice_sizes,
        "indices_are_sorted": indices_are_sorted,
    }
    (shape,) = infer(OpType.GATHER, (operand.shape, start_indices.shape), settings)
    numbers = (
        f"offset_dims = {list(offset_output_axes)}, collapsed_slice_dims = {list(collapsed_slice_axes)}, "
        f"start_index_map = {list(start_index_map)}, index_vector_dim = {index_vector_axis}"
    )
    attributes = (
        f"dimension_numbers = #stablehlo.gather<{numbers}>, slice_sizes = {int_array(slice_sizes)}, "
        f"indices_are_sorted = {_truth(indices_are_sorted)}"
    )
    return e.op("gather", (operand, index(e, start_indices)), shape, attributes)


def _scatter(name: str) -> Callable[..., Value]:
    def emit(
        e: Emitter,
        operand: Value,
        scatter_indices: Value,
        updates: Value,
        index_vector_axis: int,
        update_window_axes: Ints,
        inserted_window_axes: Ints,
        scatter_axes_to_operand_axes: Ints,
        indices_are_sorted: bool,
        unique_indices: bool,
    ) -> Value:
        wide, added = widen(e, operand, least=4), widen(e, updates, least=4)
        if not operand.rank:
            # XLA's own simplification of this case produces a module that it then rejects.
            if name == "set":
                return _last(e, operand, updates)
            start = _STARTS[name](operand.dtype)
            total = e.reduce(name, added, start, tuple(range(updates.rank)))
            return narrow(e, e.binary(name, wide, total), operand.dtype)
        numbers = (
            f"update_window_dims = {list(update_window_axes)}, inserted_window_dims = {list(inserted_window_axes)}, "
            f"scatter_dims_to_operand_dims = {list(scatter_axes_to_operand_axes)}, "
            f"index_vector_dim = {index_vector_axis}"
        )
        attributes = (
            f"scatter_dimension_numbers = #stablehlo.scatter<{numbers}>, "
            f"indices_are_sorted = {_truth(indices_are_sorted)}, unique_indices = {_truth(unique_indices)}"
        )
        region = e.region([Shape(wide.dtype)] * 2, lambda a, b: [b if name == "set" else e.binary(name, a, b)])
        result = e.op("scatter", (wide, index(e, scatter_indices), added), wide.shape, attributes, region)
        return narrow(e, result, operand.dtype)

    return emit


def _last(e: Emitter, operand: Value, updates: Value) -> Value:
    """The last update of a scalar operand, or the operand where there are none."""
    count = updates.shape.size
    if not count:
        return operand
    return e.reshape(e.slice(e.reshape(updates, count), (count - 1,), (count,)))


_STARTS: dict[str, Callable[[DType], float]] = {
    "add": lambda dtype: 0,
    "multiply": lambda dtype: 1,
    "maximum": lowest,
    "minimum": highest,
}


def _truth(value: bool) -> str:
    return "true" if value else "false"


EMITTERS: dict[OpType, Emit] = {
    OpType.GATHER: _gather,
    OpType.SCATTER_SUM: _scatter("add"),
    OpType.SCATTER_SET: _scatter("set"),
    OpType.SCATTER_MULTIPLY: _scatter("multiply"),
    OpType.SCATTER_MAX: _scatter("maximum"),
    OpType.SCATTER_MIN: _scatter("minimum"),
}
