"""Rearranging elements: shapes, axes, slices, padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from easytorch.backends.arguments import integer, integers, ints, sequence
from easytorch.backends.builder_ops.recorder import Ints, Recorder, or_default
from easytorch.backends.shapes import Shape, shape_of
from easytorch.backends.types import OpType, PadAxis

if TYPE_CHECKING:
    from easytorch.backends.graph import Op


class MovementOps(Recorder):
    """Axes and sizes are plain integers, known when the computation is built. Negative axes are refused."""

    def iota(self, shape: Shape, iota_axis: int) -> Op:
        """An array that counts from 0 along `iota_axis`."""
        return self._add_one(
            OpType.IOTA, shape=shape_of(shape, "Iota: shape"), iota_axis=integer(iota_axis, "Iota: iota_axis")
        )

    def reshape(self, x: Op, *dimensions: int | Ints) -> Op:
        """The same elements, in the same order, under other dimensions."""
        return self._add_one(OpType.RESHAPE, x, dimensions=ints(dimensions, "dimensions"))

    def transpose(self, x: Op, *permutations: int | Ints) -> Op:
        """Axis i of the output is axis `permutations[i]` of x."""
        return self._add_one(OpType.TRANSPOSE, x, permutations=ints(permutations, "permutations"))

    def broadcast(self, x: Op, *prefix_dims: int | Ints) -> Op:
        """x repeated under new leading axes."""
        return self._add_one(OpType.BROADCAST, x, prefix_dims=ints(prefix_dims, "prefix_dims"))

    def broadcast_in_dim(self, x: Op, output_shape: Shape, broadcast_axes: Ints) -> Op:
        """Axis i of x becomes axis `broadcast_axes[i]` (increasing) of the output, repeated if its size is one."""
        return self._add_one(
            OpType.BROADCAST_IN_DIM,
            x,
            output_shape=shape_of(output_shape, "BroadcastInDim: output_shape"),
            broadcast_axes=integers(broadcast_axes, "BroadcastInDim: broadcast_axes"),
        )

    def concatenate(self, axis: int, *operands: Op) -> Op:
        """The operands one after the other along `axis`."""
        return self._add_one(OpType.CONCATENATE, *operands, axis=integer(axis, "Concatenate: axis"))

    def slice(self, x: Op, starts: Ints, limits: Ints, strides: Ints | None = None) -> Op:
        """The elements from `starts` up to before `limits`, every `strides`-th (1 if None)."""
        first = integers(starts, "Slice: starts")
        steps = or_default(strides, len(first), 1, "Slice: strides")
        return self._add_one(OpType.SLICE, x, starts=first, limits=integers(limits, "Slice: limits"), strides=steps)

    def dynamic_slice(self, operand: Op, start_indices: Sequence[Op], slice_dims: Ints) -> Op:
        """`slice_dims` elements from `start_indices`, integer scalars, one per axis, clamped so that all are inside."""
        starts = sequence(start_indices, "DynamicSlice: start_indices")
        sizes = integers(slice_dims, "DynamicSlice: slice_dims")
        return self._add_one(OpType.DYNAMIC_SLICE, operand, *starts, slice_dims=sizes)

    def dynamic_update_slice(self, operand: Op, update: Op, start_indices: Sequence[Op]) -> Op:
        """operand with `update` written at `start_indices`, clamped so that all of it is inside."""
        starts = sequence(start_indices, "DynamicUpdateSlice: start_indices")
        return self._add_one(OpType.DYNAMIC_UPDATE_SLICE, operand, update, *starts)

    def pad(self, x: Op, fill_value: Op, *axes_config: PadAxis) -> Op:
        """x with `fill_value` (a scalar) around and between its elements; axes without a config stay as they are."""
        return self._add_one(OpType.PAD, x, fill_value, axes_config=axes_config)

    def reverse(self, x: Op, *axes: int | Ints) -> Op:
        """x read backwards along `axes`."""
        return self._add_one(OpType.REVERSE, x, axes=ints(axes, "axes"))
