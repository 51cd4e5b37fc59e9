"""The operations that move, gather, put together and multiply whole arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from easytorch.backends.arguments import integer, integers, ints, member, pairs, real, sequence, truth
from easytorch.backends.dtypes import dtype_of
from easytorch.backends.errors import BackendError
from easytorch.backends.shapes import Shape, shape_of
from easytorch.backends.types import ConvolveAxesConfig, FFTType, OpType, PadAxis, ReduceOpType

if TYPE_CHECKING:
    from easytorch.backends.graph import Op

Ints = Sequence[int]


class StructuralOps:
    """Axes and sizes are plain integers, known when the computation is built. Negative axes are refused."""

    def _add_one(self, op_type: OpType, *operands: Any, **attributes: Any) -> Op:
        raise NotImplementedError

    def _add(self, op_type: OpType, *operands: Any, **attributes: Any) -> tuple[Op, ...]:
        raise NotImplementedError

    def identity(self, x: Op) -> Op:
        """x itself, as a new operation."""
        return self._add_one(OpType.IDENTITY, x)

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
        steps = _or(strides, len(first), 1, "Slice: strides")
        return self._add_one(OpType.SLICE, x, starts=first, limits=integers(limits, "Slice: limits"), strides=steps)

    def dynamic_slice(self, operand: Op, start_indices: Sequence[Op], slice_dims: Ints) -> Op:
        """`slice_dims` elements from `start_indices`, integer scalars, one an axis, clamped so that all are inside."""
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

    def arg_min_max(self, x: Op, axis: int, output_dtype: Any, is_min: bool) -> Op:
        """The index of the least (or greatest) element along `axis`, which goes; the first of several; NaN wins."""
        return self._add_one(
            OpType.ARG_MIN_MAX,
            x,
            axis=integer(axis, "ArgMinMax: axis"),
            output_dtype=dtype_of(output_dtype),
            is_min=truth(is_min, "ArgMinMax: is_min"),
        )

    def dot(self, x0: Op, x1: Op) -> Op:
        """Vectors, matrix and vector, or matrices: the last axis of x0 against the first of x1."""
        return self._add_one(OpType.DOT, x0, x1)

    def dot_general(
        self,
        lhs: Op,
        lhs_contracting_axes: Ints,
        lhs_batch_axes: Ints,
        rhs: Op,
        rhs_contracting_axes: Ints,
        rhs_batch_axes: Ints,
    ) -> Op:
        """Sums over the contracting axes; the output has the batch axes, the rest of lhs, the rest of rhs."""
        return self._add_one(
            OpType.DOT_GENERAL,
            lhs,
            rhs,
            lhs_contracting_axes=integers(lhs_contracting_axes, "lhs_contracting_axes"),
            lhs_batch_axes=integers(lhs_batch_axes, "lhs_batch_axes"),
            rhs_contracting_axes=integers(rhs_contracting_axes, "rhs_contracting_axes"),
            rhs_batch_axes=integers(rhs_batch_axes, "rhs_batch_axes"),
        )

    def conv_general_dilated(
        self,
        operand: Op,
        filter: Op,
        axes: ConvolveAxesConfig,
        strides: Ints | None = None,
        paddings: Sequence[Ints] | None = None,
        input_dilation: Ints | None = None,
        filter_dilation: Ints | None = None,
        filter_group_count: int = 1,
        batch_group_count: int = 1,
    ) -> Op:
        """A convolution, without turning the filter round, over any number of axes; None is 1, or no padding."""
        if not isinstance(axes, ConvolveAxesConfig):
            raise BackendError(f"ConvGeneralDilated: axes must be a ConvolveAxesConfig, and {axes!r} was given")
        spatial = len(axes.input_spatial)
        return self._add_one(
            OpType.CONV_GENERAL_DILATED,
            operand,
            filter,
            axes=axes,
            strides=_or(strides, spatial, 1, "strides"),
            paddings=_pairs(paddings, spatial),
            input_dilation=_or(input_dilation, spatial, 1, "input_dilation"),
            filter_dilation=_or(filter_dilation, spatial, 1, "filter_dilation"),
            filter_group_count=integer(filter_group_count, "ConvGeneralDilated: filter_group_count"),
            batch_group_count=integer(batch_group_count, "ConvGeneralDilated: batch_group_count"),
        )

    def fft(self, operand: Op, fft_type: FFTType, fft_length: Ints) -> Op:
        """The discrete Fourier transform over the last axes, one for each entry of `fft_length`."""
        return self._add_one(
            OpType.FFT,
            operand,
            fft_type=member(FFTType, fft_type, "FFT: fft_type"),
            fft_length=integers(fft_length, "fft_length"),
        )

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

    def scatter_max(
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
    ) -> Op:
        """operand with `updates` at the index vectors of `scatter_indices`: the greater stays.

        A slice partly outside is left out. See https://openxla.org/stablehlo/spec#scatter.
        """
        axes = (update_window_axes, inserted_window_axes, scatter_axes_to_operand_axes)
        hints = (indices_are_sorted, unique_indices)
        return self._scatter(OpType.SCATTER_MAX, (operand, scatter_indices, updates), index_vector_axis, axes, hints)

    def scatter_min(
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
    ) -> Op:
        """operand with `updates` at the index vectors of `scatter_indices`: the less stays.

        A slice partly outside is left out. See https://openxla.org/stablehlo/spec#scatter.
        """
        axes = (update_window_axes, inserted_window_axes, scatter_axes_to_operand_axes)
        hints = (indices_are_sorted, unique_indices)
        return self._scatter(OpType.SCATTER_MIN, (operand, scatter_indices, updates), index_vector_axis, axes, hints)

    def scatter_sum(
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
    ) -> Op:
        """operand with `updates` at the index vectors of `scatter_indices`: they are added.

        A slice partly outside is left out. See https://openxla.org/stablehlo/spec#scatter.
        """
        axes = (update_window_axes, inserted_window_axes, scatter_axes_to_operand_axes)
        hints = (indices_are_sorted, unique_indices)
        return self._scatter(OpType.SCATTER_SUM, (operand, scatter_indices, updates), index_vector_axis, axes, hints)

    def scatter_set(
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
    ) -> Op:
        """operand with `updates` at the index vectors of `scatter_indices`: they replace what is there; which of
        several at one place does is not defined.

        A slice partly outside is left out. See https://openxla.org/stablehlo/spec#scatter.
        """
        axes = (update_window_axes, inserted_window_axes, scatter_axes_to_operand_axes)
        hints = (indices_are_sorted, unique_indices)
        return self._scatter(OpType.SCATTER_SET, (operand, scatter_indices, updates), index_vector_axis, axes, hints)

    def scatter_multiply(
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
    ) -> Op:
        """operand with `updates` at the index vectors of `scatter_indices`: they are multiplied.

        A slice partly outside is left out. See https://openxla.org/stablehlo/spec#scatter.
        """
        axes = (update_window_axes, inserted_window_axes, scatter_axes_to_operand_axes)
        hints = (indices_are_sorted, unique_indices)
        return self._scatter(
            OpType.SCATTER_MULTIPLY, (operand, scatter_indices, updates), index_vector_axis, axes, hints
        )

    def _scatter(
        self,
        op_type: OpType,
        operands: tuple[Op, Op, Op],
        index_vector_axis: int,
        axes: tuple[Ints, Ints, Ints],
        hints: tuple[bool, bool],
    ) -> Op:
        windows, inserted, scattered = axes
        is_sorted, unique = hints
        return self._add_one(
            op_type,
            *operands,
            index_vector_axis=integer(index_vector_axis, "index_vector_axis"),
            update_window_axes=integers(windows, "update_window_axes"),
            inserted_window_axes=integers(inserted, "inserted_window_axes"),
            scatter_axes_to_operand_axes=integers(scattered, "scatter_axes_to_operand_axes"),
            indices_are_sorted=truth(is_sorted, "indices_are_sorted"),
            unique_indices=truth(unique, "unique_indices"),
        )

    def reduce_bitwise_and(self, x: Op, *axes: int | Ints) -> Op:
        """The and of the bits over `axes`, which go; over all of them if none is given."""
        return self._add_one(OpType.REDUCE_BITWISE_AND, x, axes=ints(axes, "axes"))

    def reduce_bitwise_or(self, x: Op, *axes: int | Ints) -> Op:
        """The or of the bits over `axes`, which go; over all of them if none is given."""
        return self._add_one(OpType.REDUCE_BITWISE_OR, x, axes=ints(axes, "axes"))

    def reduce_bitwise_xor(self, x: Op, *axes: int | Ints) -> Op:
        """The exclusive or of the bits over `axes`, which go; over all of them if none is given."""
        return self._add_one(OpType.REDUCE_BITWISE_XOR, x, axes=ints(axes, "axes"))

    def reduce_logical_and(self, x: Op, *axes: int | Ints) -> Op:
        """Whether all are true over `axes`, which go; over all of them if none is given."""
        return self._add_one(OpType.REDUCE_LOGICAL_AND, x, axes=ints(axes, "axes"))

    def reduce_logical_or(self, x: Op, *axes: int | Ints) -> Op:
        """Whether any is true over `axes`, which go; over all of them if none is given."""
        return self._add_one(OpType.REDUCE_LOGICAL_OR, x, axes=ints(axes, "axes"))

    def reduce_logical_xor(self, x: Op, *axes: int | Ints) -> Op:
        """Whether an odd number is true over `axes`, which go; over all of them if none is given."""
        return self._add_one(OpType.REDUCE_LOGICAL_XOR, x, axes=ints(axes, "axes"))

    def reduce_max(self, x: Op, *axes: int | Ints) -> Op:
        """The greatest over `axes`, which go; over all of them if none is given. NaN if one is; of nothing the least of
        the type, -inf where it has one."""
        return self._add_one(OpType.REDUCE_MAX, x, axes=ints(axes, "axes"))

    def reduce_min(self, x: Op, *axes: int | Ints) -> Op:
        """The least over `axes`, which go; over all of them if none is given. NaN if one is; of nothing the greatest of
        the type, inf where it has one."""
        return self._add_one(OpType.REDUCE_MIN, x, axes=ints(axes, "axes"))

    def reduce_product(self, x: Op, *axes: int | Ints) -> Op:
        """The product over `axes`, which go; over all of them if none is given."""
        return self._add_one(OpType.REDUCE_PRODUCT, x, axes=ints(axes, "axes"))

    def reduce_sum(self, x: Op, *axes: int | Ints) -> Op:
        """The sum over `axes`, which go; over all of them if none is given. Floats narrower than float32 are added in
        float32, here and in windows, products and scatters; integers modulo 2**bits."""
        return self._add_one(OpType.REDUCE_SUM, x, axes=ints(axes, "axes"))

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
            base_dilations=_or(base_dilations, rank, 1, "base_dilations"),
            window_dilations=_or(window_dilations, rank, 1, "window_dilations"),
            paddings=_pairs(paddings, rank),
        )

    def select_and_scatter_max(
        self,
        operand: Op,
        source: Op,
        window_dimensions: Ints,
        window_strides: Ints | None = None,
        paddings: Sequence[Ints] | None = None,
    ) -> Op:
        """Adds each element of `source` at the place that its window over `operand` selects: the greatest element, the
        first of several. Padding is never selected; which element is, where one is NaN, is not defined.

        See https://openxla.org/stablehlo/spec#select_and_scatter.
        """
        operands = (operand, source)
        return self._select(OpType.SELECT_AND_SCATTER_MAX, operands, window_dimensions, window_strides, paddings)

    def select_and_scatter_min(
        self,
        operand: Op,
        source: Op,
        window_dimensions: Ints,
        window_strides: Ints | None = None,
        paddings: Sequence[Ints] | None = None,
    ) -> Op:
        """Adds each element of `source` at the place that its window over `operand` selects: the least element, the
        first of several. Padding is never selected; which element is, where one is NaN, is not defined.

        See https://openxla.org/stablehlo/spec#select_and_scatter.
        """
        operands = (operand, source)
        return self._select(OpType.SELECT_AND_SCATTER_MIN, operands, window_dimensions, window_strides, paddings)

    def select_and_scatter_sum(
        self,
        operand: Op,
        source: Op,
        window_dimensions: Ints,
        window_strides: Ints | None = None,
        paddings: Sequence[Ints] | None = None,
    ) -> Op:
        """Adds each element of `source` at the place that its window over `operand` selects: all of it.

        See https://openxla.org/stablehlo/spec#select_and_scatter.
        """
        operands = (operand, source)
        return self._select(OpType.SELECT_AND_SCATTER_SUM, operands, window_dimensions, window_strides, paddings)

    def _select(
        self,
        op_type: OpType,
        operands: tuple[Op, Op],
        window_dimensions: Ints,
        window_strides: Ints | None,
        paddings: Sequence[Ints] | None,
    ) -> Op:
        window = integers(window_dimensions, "window_dimensions")
        return self._add_one(
            op_type,
            *operands,
            window_dimensions=window,
            window_strides=window if window_strides is None else integers(window_strides, "window_strides"),
            paddings=_pairs(paddings, len(window)),
        )

    def rng_bit_generator(self, state: Op, shape: Shape) -> tuple[Op, Op]:
        """The next state, and random bits of `shape`, by Philox 4x32-10 (Salmon et al. 2011), as XLA's.

        state: uint64[3], the key and the 128-bit counter, its low half first; each block of four words adds one to it.
        Elements of 64 bits take two words, the lower first, narrower ones the low bits of a word each. The bits are the
        same on every backend.
        """
        new_state, values = self._add(OpType.RNG_BIT_GENERATOR, state, shape=shape_of(shape, "RngBitGenerator: shape"))
        return new_state, values

    def rng_bit_generator_three_fry(self, state: Op, shape: Shape) -> tuple[Op, Op]:
        """The next state, and random bits of `shape`, by ThreeFry 2x32-20 (Salmon et al. 2011), as XLA's.

        state: uint64[2], the key and the counter. Each step gives two words: neighbours along the first axis of
        even size, or the longest, one of which is left out at the end of an odd one; of 64 bits one element.
        """
        given = shape_of(shape, "RngBitGeneratorThreeFry: shape")
        new_state, values = self._add(OpType.RNG_BIT_GENERATOR_THREE_FRY, state, shape=given)
        return new_state, values

    def batch_norm_for_inference(
        self, operand: Op, scale: Op, offset: Op, mean: Op, variance: Op, epsilon: float, axis: int
    ) -> Op:
        """(operand - mean) / sqrt(variance + epsilon) * scale + offset along `axis` (Ioffe and Szegedy 2015)."""
        return self._add_one(
            OpType.BATCH_NORM_FOR_INFERENCE,
            operand,
            scale,
            offset,
            mean,
            variance,
            epsilon=real(epsilon, "epsilon"),
            axis=integer(axis, "axis"),
        )

    def batch_norm_for_training(
        self, operand: Op, scale: Op, offset: Op, epsilon: float, axis: int
    ) -> tuple[Op, Op, Op]:
        """The same by the batch's own mean and (biased) variance: normalized, mean, variance."""
        normalized, mean, variance = self._add(
            OpType.BATCH_NORM_FOR_TRAINING,
            operand,
            scale,
            offset,
            epsilon=real(epsilon, "epsilon"),
            axis=integer(axis, "axis"),
        )
        return normalized, mean, variance

    def batch_norm_gradient(
        self, operand: Op, scale: Op, mean: Op, variance: Op, grad_output: Op, epsilon: float, axis: int
    ) -> tuple[Op, Op, Op]:
        """The gradients of `batch_norm_for_training` with respect to operand, scale and offset."""
        grad_operand, grad_scale, grad_offset = self._add(
            OpType.BATCH_NORM_GRADIENT,
            operand,
            scale,
            mean,
            variance,
            grad_output,
            epsilon=real(epsilon, "epsilon"),
            axis=integer(axis, "axis"),
        )
        return grad_operand, grad_scale, grad_offset


def _or(values: Ints | None, count: int, default: int, what: str) -> tuple[int, ...]:
    return (default,) * count if values is None else integers(values, what)


def _pairs(given: Sequence[Ints] | None, count: int) -> tuple[tuple[int, int], ...]:
    return ((0, 0),) * count if given is None else pairs(given, "paddings")
