"""Operations that move elements: reshape, transpose, broadcast, slice, pad."""

from __future__ import annotations

import itertools
import math

from easytorch.backends.dtypes import SIGNED, UNSIGNED, DType
from easytorch.backends.errors import BackendError
from easytorch.backends.shapeinference.rule import Rule, require_axis, require_dtype, require_same_dtype, takes
from easytorch.backends.shapes import MAX_BYTES, Shape
from easytorch.backends.types import OpType, PadAxis

_INTEGERS = (*SIGNED, *UNSIGNED)
_COUNTING = tuple(dtype for dtype in DType if dtype is not DType.BOOL)


@takes(_COUNTING, "bool does not count")
def _iota(shape: Shape, iota_axis: int) -> Shape:
    require_dtype(shape, _COUNTING, "bool does not count")
    require_axis(shape, iota_axis, "iota_axis")
    return shape


def _reshape(x: Shape, dimensions: tuple[int, ...]) -> Shape:
    if any(size < 0 for size in dimensions) or math.prod(dimensions) != x.size:
        raise BackendError(f"{x.size} elements do not fill the dimensions {dimensions}")
    return Shape(x.dtype, dimensions)


def _transpose(x: Shape, permutations: tuple[int, ...]) -> Shape:
    if sorted(permutations) != list(range(x.rank)):
        raise BackendError(f"permutations {permutations} are not every axis of {x} once")
    return Shape(x.dtype, tuple(x.dimensions[axis] for axis in permutations))


def _broadcast(x: Shape, prefix_dims: tuple[int, ...]) -> Shape:
    if any(size < 0 for size in prefix_dims):
        raise BackendError(f"prefix_dims {prefix_dims} has a negative size")
    return Shape(x.dtype, (*prefix_dims, *x.dimensions))


def _broadcast_in_dim(x: Shape, output_shape: Shape, broadcast_axes: tuple[int, ...]) -> Shape:
    if output_shape.dtype != x.dtype:
        raise BackendError(
            f"the output shape is {output_shape.dtype}; broadcasting keeps the element type, use `convert_dtype`"
        )
    if len(broadcast_axes) != x.rank:
        raise BackendError(f"broadcast_axes has {len(broadcast_axes)} entries, one for each of {x.rank} axes is needed")
    if any(one >= other for one, other in itertools.pairwise(broadcast_axes)):
        raise BackendError(f"broadcast_axes {broadcast_axes} must be increasing")
    for axis, target in enumerate(broadcast_axes):
        require_axis(output_shape, target, "broadcast_axes:")
        if x.dimensions[axis] not in (1, output_shape.dimensions[target]):
            raise BackendError(
                f"axis {axis} cannot be broadcast to axis {target} of {output_shape}: its size is neither that nor 1"
            )
    return output_shape


def _concatenate(*operands: Shape, axis: int) -> Shape:
    if not operands:
        raise BackendError("at least one operand is needed")
    first = operands[0]
    require_same_dtype(*operands)
    require_axis(first, axis)
    rest = {(*shape.dimensions[:axis], *shape.dimensions[axis + 1 :]) for shape in operands}
    if len(rest) > 1 or len({shape.rank for shape in operands}) > 1:
        raise BackendError(f"all axes but {axis} must have the same sizes")
    total = sum(shape.dimensions[axis] for shape in operands)
    return Shape(first.dtype, (*first.dimensions[:axis], total, *first.dimensions[axis + 1 :]))


def _slice(x: Shape, starts: tuple[int, ...], limits: tuple[int, ...], strides: tuple[int, ...]) -> Shape:
    if not len(starts) == len(limits) == len(strides) == x.rank:
        raise BackendError(f"starts, limits and strides need an entry for each of {x.rank} axes")
    sizes = []
    for axis, (start, limit, stride) in enumerate(zip(starts, limits, strides, strict=True)):
        if stride < 1:
            raise BackendError(f"the stride of axis {axis} is {stride}; it must be 1 or more")
        if not 0 <= start <= limit <= x.dimensions[axis]:
            raise BackendError(f"{start} to {limit} is not inside axis {axis} of size {x.dimensions[axis]}")
        sizes.append(-(-(limit - start) // stride))
    return Shape(x.dtype, tuple(sizes))


def _indices(operand: Shape, indices: tuple[Shape, ...]) -> None:
    if len(indices) != operand.rank:
        raise BackendError(f"{len(indices)} start indices for {operand.rank} axes; one for each is needed")
    for index in indices:
        require_dtype(index, _INTEGERS, "start indices are integers")
        if index.rank:
            raise BackendError(f"start indices are scalars, and one is {index}")
    if indices:
        require_same_dtype(*indices)


def _dynamic_slice(operand: Shape, *start_indices: Shape, slice_dims: tuple[int, ...]) -> Shape:
    _indices(operand, start_indices)
    _fits(slice_dims, operand, "slice_dims")
    return Shape(operand.dtype, slice_dims)


def _dynamic_update_slice(operand: Shape, update: Shape, *start_indices: Shape) -> Shape:
    require_same_dtype(operand, update)
    _indices(operand, start_indices)
    _fits(update.dimensions, operand, "the update")
    return operand


def _fits(sizes: tuple[int, ...], operand: Shape, what: str) -> None:
    inside = len(sizes) == operand.rank and all(
        0 <= size <= full for size, full in zip(sizes, operand.dimensions, strict=True)
    )
    if not inside:
        raise BackendError(f"{what} {sizes} does not fit into {operand}")


def _pad(x: Shape, fill_value: Shape, axes_config: tuple[PadAxis, ...]) -> Shape:
    require_same_dtype(x, fill_value)
    if fill_value.rank:
        raise BackendError("the fill value must be a scalar")
    if len(axes_config) > x.rank:
        raise BackendError(f"axes_config has {len(axes_config)} entries, one for each of {x.rank} axes is needed")
    sizes = list(x.dimensions)
    for axis, pad in enumerate(axes_config):
        if not isinstance(pad, PadAxis):
            raise BackendError(f"axes_config must hold PadAxis, got {pad!r}")
        if pad.interior < 0:
            raise BackendError(
                f"the padding between elements of axis {axis} is {pad.interior}; only ends can be cropped"
            )
        if max(abs(pad.start), abs(pad.end), pad.interior) > MAX_BYTES:
            raise BackendError(f"axis {axis} is padded by {pad}, beyond the largest size")
        size = sizes[axis]
        sizes[axis] = size + max(size - 1, 0) * pad.interior + pad.start + pad.end
        if sizes[axis] < 0:
            raise BackendError(f"axis {axis} of size {size} is cropped by more than its size")
    return Shape(x.dtype, tuple(sizes))


def _reverse(x: Shape, axes: tuple[int, ...]) -> Shape:
    if len(set(axes)) != len(axes):
        raise BackendError(f"axes {axes} name an axis twice")
    for axis in axes:
        require_axis(x, axis)
    return x


RULES: dict[OpType, Rule] = {
    OpType.IOTA: _iota,
    OpType.RESHAPE: _reshape,
    OpType.TRANSPOSE: _transpose,
    OpType.BROADCAST: _broadcast,
    OpType.BROADCAST_IN_DIM: _broadcast_in_dim,
    OpType.CONCATENATE: _concatenate,
    OpType.SLICE: _slice,
    OpType.DYNAMIC_SLICE: _dynamic_slice,
    OpType.DYNAMIC_UPDATE_SLICE: _dynamic_update_slice,
    OpType.PAD: _pad,
    OpType.REVERSE: _reverse,
}
