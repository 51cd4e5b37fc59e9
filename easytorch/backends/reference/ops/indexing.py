"""Gather and scatter (https://openxla.org/stablehlo/spec#gather, #scatter)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from easytorch.backends.reference.narrow import wide, widened
from easytorch.backends.types import OpType


def _starts(indices: np.ndarray, index_vector_axis: int, axes: Sequence[int], rank: int) -> np.ndarray:
    """(places, rank): where each slice begins; 0 along the axes that the index vectors do not give."""
    plain = wide(indices)
    if plain.dtype == np.uint64:
        # Larger than any size, so that an index that int64 cannot hold stays out of range.
        plain = np.minimum(plain, np.uint64(np.iinfo(np.int64).max))
    plain = plain.astype(np.int64)
    if index_vector_axis == indices.ndim:
        plain = plain[..., None]
    vectors = np.moveaxis(plain, index_vector_axis, -1)
    vectors = vectors.reshape(int(np.prod(vectors.shape[:-1], dtype=np.int64)), len(axes))
    starts = np.zeros((len(vectors), rank), np.int64)
    starts[:, list(axes)] = vectors
    return starts


def _places(starts: np.ndarray, sizes: Sequence[int]) -> tuple[np.ndarray, ...]:
    """For each axis the indices of the slices' elements, broadcastable to (places, *sizes)."""
    rank = len(sizes)
    return tuple(
        starts[:, axis].reshape(-1, *(1,) * rank) + np.arange(size).reshape(-1, *(1,) * (rank - axis - 1))
        for axis, size in enumerate(sizes)
    )


def _batch(indices: np.ndarray, index_vector_axis: int) -> tuple[int, ...]:
    return tuple(size for axis, size in enumerate(indices.shape) if axis != index_vector_axis)


def _gather(
    operand: np.ndarray,
    start_indices: np.ndarray,
    index_vector_axis: int,
    offset_output_axes: tuple[int, ...],
    collapsed_slice_axes: tuple[int, ...],
    start_index_map: tuple[int, ...],
    slice_sizes: tuple[int, ...],
    indices_are_sorted: bool,
) -> np.ndarray:
    starts = _starts(start_indices, index_vector_axis, start_index_map, operand.ndim)
    room = np.array(operand.shape, np.int64) - np.array(slice_sizes, np.int64)
    found = operand[_places(np.clip(starts, 0, room), slice_sizes)] if operand.ndim else operand
    found = np.broadcast_to(found, (len(starts), *slice_sizes))
    batch = _batch(start_indices, index_vector_axis)
    kept = [size for axis, size in enumerate(slice_sizes) if axis not in collapsed_slice_axes]
    rank = len(batch) + len(kept)
    batch_axes = [axis for axis in range(rank) if axis not in offset_output_axes]
    return found.reshape((*batch, *kept)).transpose(np.argsort((*batch_axes, *offset_output_axes), kind="stable"))


def _scatter(function: np.ufunc | None) -> Callable[..., np.ndarray]:
    """function: combines an element and its update; None: the update replaces the element."""

    def scatter(
        operand: np.ndarray,
        scatter_indices: np.ndarray,
        updates: np.ndarray,
        index_vector_axis: int,
        update_window_axes: tuple[int, ...],
        inserted_window_axes: tuple[int, ...],
        scatter_axes_to_operand_axes: tuple[int, ...],
        indices_are_sorted: bool,
        unique_indices: bool,
    ) -> np.ndarray:
        starts = _starts(scatter_indices, index_vector_axis, scatter_axes_to_operand_axes, operand.ndim)
        batch_axes = [axis for axis in range(updates.ndim) if axis not in update_window_axes]
        windows = iter([updates.shape[axis] for axis in update_window_axes])
        sizes = [1 if axis in inserted_window_axes else next(windows) for axis in range(operand.ndim)]
        slices = updates.transpose(*batch_axes, *update_window_axes).reshape(len(starts), *sizes)
        room = np.array(operand.shape, np.int64) - np.array(sizes, np.int64)
        inside = ((starts >= 0) & (starts <= room)).all(1)
        result = operand.copy()
        if operand.ndim:
            places = _places(starts[inside], sizes)
            if function is None:
                result[places] = slices[inside]
            else:
                function.at(result, places, slices[inside])
        else:
            for value in slices:
                result = np.asarray(value if function is None else function(result, value))
        return result

    def computed(
        operand: np.ndarray, scatter_indices: np.ndarray, updates: np.ndarray, **attributes: Any
    ) -> np.ndarray:
        # The indices keep their type; only the operand and the updates are widened.
        return widened(lambda x, y: scatter(x, scatter_indices, y, **attributes))(operand, updates)

    return computed


INDEXING: dict[OpType, Callable[..., np.ndarray]] = {
    OpType.GATHER: _gather,
    OpType.SCATTER_SUM: _scatter(np.add),
    OpType.SCATTER_SET: _scatter(None),
    OpType.SCATTER_MULTIPLY: _scatter(np.multiply),
    OpType.SCATTER_MAX: _scatter(np.maximum),
    OpType.SCATTER_MIN: _scatter(np.minimum),
}
