"""Operations that move elements: reshape, broadcast, slice, pad, ..."""

from __future__ import annotations

from easytorch.backends.dtypes import DType
from easytorch.backends.shapes import Shape
from easytorch.backends.types import OpType, PadAxis
from easytorch.backends.xla.emitter import Emitter, Value, int_array
from easytorch.backends.xla.ops import Emit
from easytorch.backends.xla.ops.conversion import convert


def _iota(e: Emitter, shape: Shape, iota_axis: int) -> Value:
    if shape.dtype.size == 1:
        # Counted in int32 and then converted: a narrow type cannot count a long axis.
        return convert(e, e.iota(shape.with_dtype(DType.INT32), iota_axis), shape.dtype)
    return e.iota(shape, iota_axis)


def _reshape(e: Emitter, x: Value, dimensions: tuple[int, ...]) -> Value:
    return e.reshape(x, *dimensions)


def transpose(e: Emitter, x: Value, permutations: tuple[int, ...]) -> Value:
    """Axis i of the result is axis `permutations[i]` of x."""
    sizes = tuple(x.dimensions[axis] for axis in permutations)
    return e.op("transpose", (x,), Shape(x.dtype, sizes), f"permutation = {int_array(permutations)}")


def _broadcast(e: Emitter, x: Value, prefix_dims: tuple[int, ...]) -> Value:
    count = len(prefix_dims)
    return e.broadcast(x, (*prefix_dims, *x.dimensions), range(count, count + x.rank))


def _broadcast_in_dim(e: Emitter, x: Value, output_shape: Shape, broadcast_axes: tuple[int, ...]) -> Value:
    return e.broadcast(x, output_shape.dimensions, broadcast_axes)


def concatenate(e: Emitter, *operands: Value, axis: int) -> Value:
    """The parts one after the other along `axis`."""
    first = operands[0]
    total = sum(operand.dimensions[axis] for operand in operands)
    sizes = (*first.dimensions[:axis], total, *first.dimensions[axis + 1 :])
    return e.op("concatenate", operands, Shape(first.dtype, sizes), f"dimension = {axis} : i64")


def _slice(e: Emitter, x: Value, starts: tuple[int, ...], limits: tuple[int, ...], strides: tuple[int, ...]) -> Value:
    return e.slice(x, starts, limits, strides)


def pad(e: Emitter, x: Value, fill_value: Value, axes_config: tuple[PadAxis, ...]) -> Value:
    """x with `fill_value` around and between its elements."""
    axes = (*axes_config, *(PadAxis() for _ in range(x.rank - len(axes_config))))
    sizes = tuple(
        size + max(size - 1, 0) * axis.interior + axis.start + axis.end
        for size, axis in zip(x.dimensions, axes, strict=True)
    )
    low, high, between = (int_array(getattr(axis, name) for axis in axes) for name in ("start", "end", "interior"))
    attributes = f"edge_padding_low = {low}, edge_padding_high = {high}, interior_padding = {between}"
    return e.op("pad", (x, fill_value), Shape(x.dtype, sizes), attributes)


def _reverse(e: Emitter, x: Value, axes: tuple[int, ...]) -> Value:
    return e.op("reverse", (x,), x.shape, f"dimensions = {int_array(axes)}")


def _dynamic_slice(e: Emitter, x: Value, *start_indices: Value, slice_dims: tuple[int, ...]) -> Value:
    operands = (x, *(index(e, start) for start in start_indices))
    return e.op("dynamic_slice", operands, Shape(x.dtype, slice_dims), f"slice_sizes = {int_array(slice_dims)}")


def _dynamic_update_slice(e: Emitter, x: Value, update: Value, *start_indices: Value) -> Value:
    return e.op("dynamic_update_slice", (x, update, *(index(e, start) for start in start_indices)), x.shape)


def index(e: Emitter, x: Value) -> Value:
    """Indices in a wide signed type: XLA clamps and compares them in their own type, which overflows if narrow."""
    if x.dtype in (DType.INT32, DType.INT64):
        return x
    if x.dtype is DType.UINT64:
        most = e.like(x, 2**62)
        return e.convert(e.binary("minimum", x, most), DType.INT64)
    return e.convert(x, DType.INT64 if x.dtype is DType.UINT32 else DType.INT32)


EMITTERS: dict[OpType, Emit] = {
    OpType.IOTA: _iota,
    OpType.RESHAPE: _reshape,
    OpType.TRANSPOSE: transpose,
    OpType.BROADCAST: _broadcast,
    OpType.BROADCAST_IN_DIM: _broadcast_in_dim,
    OpType.CONCATENATE: concatenate,
    OpType.SLICE: _slice,
    OpType.DYNAMIC_SLICE: _dynamic_slice,
    OpType.DYNAMIC_UPDATE_SLICE: _dynamic_update_slice,
    OpType.PAD: pad,
    OpType.REVERSE: _reverse,
}
