"""Operations that move elements: reshape, broadcast, slice, pad, ..."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from easytorch.backends.reference.narrow import wrapped
from easytorch.backends.shapes import Shape
from easytorch.backends.types import OpType, PadAxis


def _iota(shape: Shape, iota_axis: int) -> np.ndarray:
    count = np.arange(shape.dimensions[iota_axis])
    sizes = [1] * shape.rank
    sizes[iota_axis] = -1
    count = wrapped(count, shape.dtype) if shape.dtype.is_integer else count.astype(shape.dtype.numpy)
    return np.broadcast_to(count.reshape(sizes), shape.dimensions)


def _broadcast_in_dim(x: np.ndarray, output_shape: Shape, broadcast_axes: tuple[int, ...]) -> np.ndarray:
    sizes = [1] * output_shape.rank
    for size, axis in zip(x.shape, broadcast_axes, strict=True):
        sizes[axis] = size
    return np.broadcast_to(x.reshape(sizes), output_shape.dimensions)


def _slice(x: np.ndarray, starts: Sequence[int], limits: Sequence[int], strides: Sequence[int]) -> np.ndarray:
    return x[tuple(slice(*bounds) for bounds in zip(starts, limits, strides, strict=True))]


def padded(x: np.ndarray, fill_value: np.ndarray, axes_config: Sequence[PadAxis]) -> np.ndarray:
    """x with `fill_value` around and between its elements; elements that negative padding crops are never allocated."""
    pads = [*axes_config, *(PadAxis() for _ in range(x.ndim - len(axes_config)))]
    steps = [pad.interior + 1 for pad in pads]
    sizes = [
        max(size - 1, 0) * step + min(size, 1) + pad.start + pad.end
        for size, step, pad in zip(x.shape, steps, pads, strict=True)
    ]
    result = np.full(sizes, fill_value, x.dtype)
    taken, places = [], []
    for size, step, pad, full in zip(x.shape, steps, pads, sizes, strict=True):
        # The first and the last element whose position, pad.start + element * step, is inside.
        first = min(max(-(pad.start // step), 0), size)
        last = min((full - 1 - pad.start) // step, size - 1)
        taken.append(slice(first, max(last + 1, first)))
        count = max(last + 1 - first, 0)
        begin = pad.start + first * step
        places.append(slice(begin, begin + (count - 1) * step + 1, step) if count else slice(0, 0))
    result[tuple(places)] = x[tuple(taken)]
    return result


def _window(dimensions: Sequence[int], sizes: Sequence[int], starts: Sequence[np.ndarray]) -> tuple[slice, ...]:
    """The slice of `sizes` with its start clamped so that all of it is inside."""
    firsts = [min(max(int(start), 0), full - size) for full, size, start in zip(dimensions, sizes, starts, strict=True)]
    return tuple(slice(first, first + size) for first, size in zip(firsts, sizes, strict=True))


def _dynamic_slice(operand: np.ndarray, *start_indices: np.ndarray, slice_dims: tuple[int, ...]) -> np.ndarray:
    return operand[_window(operand.shape, slice_dims, start_indices)]


def _dynamic_update_slice(operand: np.ndarray, update: np.ndarray, *start_indices: np.ndarray) -> np.ndarray:
    result = operand.copy()
    result[_window(operand.shape, update.shape, start_indices)] = update
    return result


MOVEMENT: dict[OpType, Callable[..., np.ndarray]] = {
    OpType.IOTA: _iota,
    OpType.RESHAPE: lambda x, dimensions: x.reshape(dimensions),
    OpType.TRANSPOSE: lambda x, permutations: x.transpose(permutations),
    OpType.BROADCAST: lambda x, prefix_dims: np.broadcast_to(x, (*prefix_dims, *x.shape)),
    OpType.BROADCAST_IN_DIM: _broadcast_in_dim,
    OpType.CONCATENATE: lambda *operands, axis: np.concatenate(operands, axis),
    OpType.SLICE: _slice,
    OpType.DYNAMIC_SLICE: _dynamic_slice,
    OpType.DYNAMIC_UPDATE_SLICE: _dynamic_update_slice,
    OpType.PAD: lambda x, fill_value, axes_config: padded(x, fill_value, axes_config),
    OpType.REVERSE: lambda x, axes: np.flip(x, axes),
}
