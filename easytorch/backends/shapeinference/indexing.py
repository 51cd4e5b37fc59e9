"""Gather and scatter (https://openxla.org/stablehlo/spec#gather, #scatter)."""

from __future__ import annotations

from easytorch.backends.dtypes import COMPLEX, FLOATS, SIGNED, UNSIGNED, DType
from easytorch.backends.errors import BackendError
from easytorch.backends.shapeinference.rule import Rule, require_axis, require_dtype, require_same_dtype, takes
from easytorch.backends.shapes import Shape
from easytorch.backends.types import OpType

_INTEGERS = (*SIGNED, *UNSIGNED)


def _gather(
    operand: Shape,
    start_indices: Shape,
    index_vector_axis: int,
    offset_output_axes: tuple[int, ...],
    collapsed_slice_axes: tuple[int, ...],
    start_index_map: tuple[int, ...],
    slice_sizes: tuple[int, ...],
    indices_are_sorted: bool,
) -> Shape:
    batch = _batch(start_indices, index_vector_axis, start_index_map, operand)
    if len(slice_sizes) != operand.rank or any(
        not 0 <= size <= full for size, full in zip(slice_sizes, operand.dimensions, strict=False)
    ):
        raise BackendError(f"slice_sizes {slice_sizes} do not fit into the operand")
    _increasing("collapsed_slice_axes", collapsed_slice_axes, operand.rank)
    if any(slice_sizes[axis] > 1 for axis in collapsed_slice_axes):
        raise BackendError(f"collapsed_slice_axes {collapsed_slice_axes} have slices of more than one element")
    kept = [size for axis, size in enumerate(slice_sizes) if axis not in collapsed_slice_axes]
    rank = len(batch) + len(kept)
    _increasing("offset_output_axes", offset_output_axes, rank)
    if len(offset_output_axes) != len(kept):
        raise BackendError(
            f"{len(offset_output_axes)} offset_output_axes and {len(collapsed_slice_axes)} collapsed_slice_axes are "
            f"not the {operand.rank} axes of the operand"
        )
    offsets, rest = iter(kept), iter(batch)
    return Shape(operand.dtype, tuple(next(offsets if axis in offset_output_axes else rest) for axis in range(rank)))


def _scatter(
    operand: Shape,
    scatter_indices: Shape,
    updates: Shape,
    index_vector_axis: int,
    update_window_axes: tuple[int, ...],
    inserted_window_axes: tuple[int, ...],
    scatter_axes_to_operand_axes: tuple[int, ...],
    indices_are_sorted: bool,
    unique_indices: bool,
) -> Shape:
    require_same_dtype(operand, updates)
    batch = _batch(scatter_indices, index_vector_axis, scatter_axes_to_operand_axes, operand)
    _increasing("update_window_axes", update_window_axes, updates.rank)
    _increasing("inserted_window_axes", inserted_window_axes, operand.rank)
    if len(update_window_axes) + len(inserted_window_axes) != operand.rank:
        raise BackendError(
            f"{len(update_window_axes)} update_window_axes and {len(inserted_window_axes)} inserted_window_axes are "
            f"not the {operand.rank} axes of the operand"
        )
    windows = [size for axis, size in enumerate(operand.dimensions) if axis not in inserted_window_axes]
    for axis, full in zip(update_window_axes, windows, strict=True):
        if updates.dimensions[axis] > full:
            raise BackendError(f"axis {axis} of the updates is larger than the operand's, {full}")
    given = tuple(size for axis, size in enumerate(updates.dimensions) if axis not in update_window_axes)
    if given != batch:
        raise BackendError(f"the updates have the batch dimensions {given}, the indices {batch}")
    return operand


def _batch(indices: Shape, index_vector_axis: int, axes: tuple[int, ...], operand: Shape) -> tuple[int, ...]:
    """The batch dimensions of `indices`, whose index vectors have an entry for each of the operand's `axes`."""
    require_dtype(indices, _INTEGERS, "indices are integers")
    if not 0 <= index_vector_axis <= indices.rank:
        raise BackendError(f"index_vector_axis {index_vector_axis} is not one of the indices' axes, or the next")
    length = indices.dimensions[index_vector_axis] if index_vector_axis < indices.rank else 1
    if length != len(axes):
        raise BackendError(f"index vectors have {length} entries, for the axes {axes} of the operand")
    if len(set(axes)) != len(axes):
        raise BackendError(f"the indices give an axis of the operand twice: {axes}")
    for axis in axes:
        require_axis(operand, axis, "the indices' axis")
    return tuple(size for axis, size in enumerate(indices.dimensions) if axis != index_vector_axis)


def _increasing(name: str, axes: tuple[int, ...], rank: int) -> None:
    if list(axes) != sorted({*axes}) or any(not 0 <= axis < rank for axis in axes):
        raise BackendError(f"{name} {axes} are not increasing axes of {rank}")


_scatter_ordered = takes((*_INTEGERS, *FLOATS, DType.BOOL), "integers, floats and bool")(_scatter)
_scatter_any = takes(tuple(DType), "any")(_scatter)
_scatter_sum = takes((*_INTEGERS, *FLOATS, *COMPLEX), "integers, floats and complex numbers")(_scatter)

RULES: dict[OpType, Rule] = {
    OpType.GATHER: _gather,
    OpType.SCATTER_MAX: _scatter_ordered,
    OpType.SCATTER_MIN: _scatter_ordered,
    OpType.SCATTER_SUM: _scatter_sum,
    OpType.SCATTER_MULTIPLY: _scatter_sum,
    OpType.SCATTER_SET: _scatter_any,
}
