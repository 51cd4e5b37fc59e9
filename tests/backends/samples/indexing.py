"""Gather and scatter, by the formulas of StableHLO's specification, element by element."""

from __future__ import annotations

from typing import Any

import numpy as np
from backend_samples.make import Sample, modular, normal

from easytorch.backends.dtypes import DType, dtype_of
from easytorch.backends.shapeinference import accepted_dtypes
from easytorch.backends.types import OpType

_PAST = [[-3, 1], [0, 9], [2, 2], [3, 0]]
# operand, indices, index_vector_axis, offset_output_axes, collapsed_slice_axes, start_index_map, slice_sizes
_GATHERS: dict[str, tuple[tuple[int, ...], Any, int, Any, Any, Any, Any]] = {
    "rows": ((5, 3), [[0, 2], [4, 4]], 2, (2,), (0,), (0,), (1, 3)),
    "elements": ((4, 5), _PAST, 1, (), (0, 1), (0, 1), (1, 1)),
    "windows": ((4, 5), _PAST, 1, (1, 2), (), (0, 1), (2, 3)),
    "windows first": ((4, 5), _PAST, 1, (0, 1), (), (0, 1), (2, 3)),
    "between": ((4, 5), [[[0, 1], [2, 3]], [[1, 1], [9, -9]]], 2, (1,), (0,), (1, 0), (1, 3)),
    "vector axis first": ((4, 5), [[0, 3, 9], [1, 2, 0]], 0, (0,), (1,), (0, 1), (2, 1)),
    "one place": ((4, 5), [2], 0, (0, 1), (), (1,), (2, 3)),
    "no places": ((4, 5), np.zeros((0, 2)), 1, (1,), (0,), (0, 1), (1, 2)),
    "nothing": ((4, 5), [[1], [2]], 1, (1, 2), (), (0,), (0, 5)),
    "scalar": ((), np.zeros((3, 0)), 1, (), (), (), ()),
}
# operand, indices, index_vector_axis, update_window_axes, inserted_window_axes, scatter_axes, updates
_SCATTERS: dict[str, tuple[tuple[int, ...], Any, int, Any, Any, Any, tuple[int, ...]]] = {
    "rows": ((5, 3), [0, 2, 0, 4], 1, (1,), (0,), (0,), (4, 3)),
    "elements": ((4, 5), [[-3, 1], [0, 9], [2, 2], [3, 0], [2, 2]], 1, (), (0, 1), (0, 1), (5,)),
    "windows": ((4, 5), [[0, 0], [3, 3], [1, 2], [2, 2], [-1, 0]], 1, (1, 2), (), (0, 1), (5, 2, 3)),
    "windows first": ((4, 5), [[1, 0], [2, 2]], 1, (0, 1), (), (1, 0), (2, 3, 2)),
    "vector axis first": ((4, 5), [[0, 3, 9], [1, 2, 0]], 0, (0,), (1,), (0, 1), (1, 3)),
    "one place": ((4, 5), [2], 0, (0, 1), (), (1,), (2, 3)),
    "no places": ((4, 5), np.zeros((0, 2)), 1, (1,), (0,), (0, 1), (0, 2)),
    "scalar": ((), np.zeros((3, 0)), 1, (), (), (), (3,)),
}
# Those that give no place twice.
_APART = ("vector axis first", "one place", "no places", "scalar")
_FUNCTIONS = {
    OpType.SCATTER_SUM: lambda one, other: one + other,
    OpType.SCATTER_SET: lambda one, other: other,
    OpType.SCATTER_MULTIPLY: lambda one, other: one * other,
    OpType.SCATTER_MAX: lambda one, other: np.maximum(one, other),
    OpType.SCATTER_MIN: lambda one, other: np.minimum(one, other),
}


def _vector(indices: np.ndarray, index_vector_axis: int, place: tuple[int, ...]) -> list[int]:
    if index_vector_axis == indices.ndim:
        return [int(indices[place])]
    at = (*place[:index_vector_axis], slice(None), *place[index_vector_axis:])
    return [int(index) for index in indices[at]]


def _gathered(x: np.ndarray, indices: np.ndarray, iva: int, offsets: Any, collapsed: Any, map_: Any, sizes: Any) -> Any:
    batch = [size for axis, size in enumerate(indices.shape) if axis != iva]
    kept = [axis for axis in range(x.ndim) if axis not in collapsed]
    rank = len(batch) + len(kept)
    batch_axes = [axis for axis in range(rank) if axis not in offsets]
    dims = [0] * rank
    for axis, size in zip((*batch_axes, *offsets), (*batch, *(sizes[axis] for axis in kept)), strict=True):
        dims[axis] = size
    result = np.empty(dims, x.dtype)
    for index in np.ndindex(*dims):
        start = [0] * x.ndim
        for axis, value in zip(map_, _vector(indices, iva, tuple(index[a] for a in batch_axes)), strict=True):
            start[axis] = min(max(value, 0), x.shape[axis] - sizes[axis])
        for axis, offset in zip(kept, offsets, strict=True):
            start[axis] += index[offset]
        result[index] = x[tuple(start)]
    return result


def _scattered(
    op_type: OpType,
    x: np.ndarray,
    indices: np.ndarray,
    updates: np.ndarray,
    iva: int,
    window: Any,
    inserted: Any,
    map_: Any,
) -> np.ndarray:
    dtype = dtype_of(x.dtype)
    wide = x.astype(np.float64 if dtype.is_float else np.complex128 if dtype.is_complex else object)
    result = np.array(wide)
    kept = [axis for axis in range(x.ndim) if axis not in inserted]
    sizes = [1] * x.ndim
    for axis, at in zip(kept, window, strict=True):
        sizes[axis] = updates.shape[at]
    batch_axes = [axis for axis in range(updates.ndim) if axis not in window]
    for index in np.ndindex(*updates.shape):
        start = [0] * x.ndim
        for axis, value in zip(map_, _vector(indices, iva, tuple(index[a] for a in batch_axes)), strict=True):
            start[axis] = value
        if any(not 0 <= s <= full - size for s, full, size in zip(start, x.shape, sizes, strict=True)):
            continue
        for axis, at in zip(kept, window, strict=True):
            start[axis] += index[at]
        update = updates[index].astype(wide.dtype) if wide.dtype != object else updates[index].item()
        result[tuple(start)] = _FUNCTIONS[op_type](result[tuple(start)], update)
    if dtype.is_integer:
        return modular(result, dtype)
    return result.astype(dtype.numpy)


def _gathers() -> list[Sample]:
    found = []
    for name, (dims, indices, *settings) in _GATHERS.items():
        for dtype in DType if name == "between" else (DType.FLOAT32, DType.INT4):
            found.append(
                Sample(
                    OpType.GATHER,
                    f"{name} {dtype}",
                    (normal(dtype, *dims), np.array(indices, np.int32)),
                    lambda b, x, i, s=tuple(settings): b.gather(x, i, *s),
                    host=lambda x, i, s=tuple(settings): _gathered(x, i, *s),
                    exact=True,
                )
            )
    for index_type in (DType.INT8, DType.INT64, DType.UINT8, DType.UINT32, DType.UINT64):
        indices = np.array([[1, 2], [3, 100]], index_type.numpy)
        found.append(
            Sample(
                OpType.GATHER,
                f"by {index_type}",
                (normal(DType.FLOAT32, 4, 5), indices),
                lambda b, x, i: b.gather(x, i, 1, (1,), (0,), (0, 1), (1, 2)),
                host=lambda x, i: _gathered(x, i, 1, (1,), (0,), (0, 1), (1, 2)),
                exact=True,
            )
        )
    rows = np.array([0, 1, 1, 3], np.int32)
    found.append(
        Sample(
            OpType.GATHER,
            "sorted",
            (normal(DType.FLOAT32, 4, 5), rows),
            lambda b, x, i: b.gather(x, i, 1, (1,), (0,), (0,), (1, 5), indices_are_sorted=True),
            host=lambda x, i: x[i],
            exact=True,
        )
    )
    return found


def _scatters() -> list[Sample]:
    found = []
    for op_type in _FUNCTIONS:
        for name, (dims, indices, *settings, places) in _SCATTERS.items():
            if op_type is OpType.SCATTER_SET and name not in _APART:
                continue
            for dtype in (
                sorted(accepted_dtypes(op_type)) if name in ("windows", "one place") else (DType.FLOAT32, DType.INT8)
            ):
                found.append(
                    Sample(
                        op_type,
                        f"{name} {dtype}",
                        (normal(dtype, *dims), np.array(indices, np.int32), normal(dtype, *places, seed=1)),
                        lambda b, x, i, u, op=op_type, s=tuple(settings): getattr(b, op.method)(x, i, u, *s),
                        host=lambda x, i, u, op=op_type, s=tuple(settings): _scattered(op, x, i, u, *s),
                        exact=op_type not in (OpType.SCATTER_SUM, OpType.SCATTER_MULTIPLY) or dtype.is_integer,
                        scaled=True,
                    )
                )
        for index_type in (DType.UINT8, DType.INT64, DType.UINT64):
            found.append(
                Sample(
                    op_type,
                    f"by {index_type}, sorted and unique",
                    (normal(DType.FLOAT32, 4, 5), np.array([0, 2, 3], index_type.numpy), normal(DType.FLOAT32, 3, 5)),
                    lambda b, x, i, u, op=op_type: getattr(b, op.method)(x, i, u, 1, (1,), (0,), (0,), True, True),
                    host=lambda x, i, u, op=op_type: _scattered(op, x, i, u, 1, (1,), (0,), (0,)),
                    scaled=True,
                )
            )
    return found


def samples() -> list[Sample]:
    """All of this file."""
    return [*_gathers(), *_scatters()]
