"""Products: dot, convolution, Fourier transforms."""

from __future__ import annotations

from easytorch.backends.dtypes import DType
from easytorch.backends.shapeinference import infer
from easytorch.backends.shapes import Shape
from easytorch.backends.types import ConvolveAxesConfig, FFTType, OpType
from easytorch.backends.xla.emitter import Emitter, Value, int_array, pairs
from easytorch.backends.xla.narrow import narrow, widened
from easytorch.backends.xla.ops import Emit

Ints = tuple[int, ...]
# Full float32 products: by default TPUs and newer GPUs round the operands to bfloat16 or tf32.
_HIGHEST = "precision_config = [#stablehlo<precision HIGHEST>, #stablehlo<precision HIGHEST>]"


def _sum_dtype(dtype: DType) -> DType:
    """The type that products are accumulated in."""
    return DType.FLOAT32 if dtype.is_float and dtype.size < 4 else dtype


def _dot_general(
    e: Emitter,
    lhs: Value,
    rhs: Value,
    lhs_contracting_axes: Ints,
    lhs_batch_axes: Ints,
    rhs_contracting_axes: Ints,
    rhs_batch_axes: Ints,
) -> Value:
    numbers = (
        f"lhs_batching_dimensions = {list(lhs_batch_axes)}, rhs_batching_dimensions = {list(rhs_batch_axes)}, "
        f"lhs_contracting_dimensions = {list(lhs_contracting_axes)}, "
        f"rhs_contracting_dimensions = {list(rhs_contracting_axes)}"
    )
    axes = {
        "lhs_contracting_axes": lhs_contracting_axes,
        "lhs_batch_axes": lhs_batch_axes,
        "rhs_contracting_axes": rhs_contracting_axes,
        "rhs_batch_axes": rhs_batch_axes,
    }
    (shape,) = infer(OpType.DOT_GENERAL, (lhs.shape, rhs.shape), axes)
    attributes = f"dot_dimension_numbers = #stablehlo.dot<{numbers}>, {_HIGHEST}"
    product = e.op("dot_general", (lhs, rhs), shape.with_dtype(_sum_dtype(lhs.dtype)), attributes)
    return narrow(e, product, lhs.dtype)


def _dot(e: Emitter, x0: Value, x1: Value) -> Value:
    return _dot_general(e, x0, x1, (x0.rank - 1,), (), (0,), ())


def _convolution(e: Emitter, operand: Value, filter: Value, axes: ConvolveAxesConfig, **settings: object) -> Value:
    (shape,) = infer(OpType.CONV_GENERAL_DILATED, (operand.shape, filter.shape), {"axes": axes, **settings})
    layout = (
        "x".join(
            (
                _layout("b", axes.input_batch, "f", axes.input_channel, axes.input_spatial),
                _layout("i", axes.kernel_input_channel, "o", axes.kernel_output_channel, axes.kernel_spatial),
            )
        )
        + "->"
        + _layout("b", axes.output_batch, "f", axes.output_channel, axes.output_spatial)
    )
    attributes = ", ".join(
        (
            f"dimension_numbers = #stablehlo.conv<{layout}>",
            f"window_strides = {int_array(settings['strides'])}",  # type: ignore[arg-type]
            f"padding = {pairs(settings['paddings'])}",  # type: ignore[arg-type]
            f"lhs_dilation = {int_array(settings['input_dilation'])}",  # type: ignore[arg-type]
            f"rhs_dilation = {int_array(settings['filter_dilation'])}",  # type: ignore[arg-type]
            f"feature_group_count = {settings['filter_group_count']} : i64",
            f"batch_group_count = {settings['batch_group_count']} : i64",
            _HIGHEST,
        )
    )
    product = e.op("convolution", (operand, filter), shape.with_dtype(_sum_dtype(operand.dtype)), attributes)
    return narrow(e, product, operand.dtype)


def _layout(first: str, first_axis: int, second: str, second_axis: int, spatial: Ints) -> str:
    names = {first_axis: first, second_axis: second, **{axis: str(number) for number, axis in enumerate(spatial)}}
    return f"[{', '.join(names[axis] for axis in range(len(names)))}]"


def _fft(e: Emitter, x: Value, fft_type: FFTType, fft_length: Ints) -> Value:
    (shape,) = infer(OpType.FFT, (x.shape,), {"fft_type": fft_type, "fft_length": fft_length})
    kind = {
        FFTType.FORWARD: "FFT",
        FFTType.INVERSE: "IFFT",
        FFTType.FORWARD_REAL: "RFFT",
        FFTType.INVERSE_REAL: "IRFFT",
    }[fft_type]
    attributes = f"fft_type = #stablehlo<fft_type {kind}>, fft_length = {int_array(fft_length)}"
    return e.op("fft", (x,), Shape(shape.dtype, shape.dimensions), attributes)


def _triangular_solve(
    e: Emitter, a: Value, b: Value, left_side: bool, lower: bool, unit_diagonal: bool, adjoint: bool
) -> Value:
    left, low, unit = (str(flag).lower() for flag in (left_side, lower, unit_diagonal))
    transpose = "ADJOINT" if adjoint else "NO_TRANSPOSE"
    attributes = (
        f"left_side = {left}, lower = {low}, unit_diagonal = {unit}, transpose_a = #stablehlo<transpose {transpose}>"
    )
    return e.op("triangular_solve", (a, b), b.shape, attributes)


EMITTERS: dict[OpType, Emit] = {
    OpType.TRIANGULAR_SOLVE: widened(_triangular_solve, least=4),
    OpType.DOT: widened(_dot),
    OpType.DOT_GENERAL: widened(_dot_general),
    OpType.CONV_GENERAL_DILATED: widened(_convolution),
    OpType.FFT: _fft,
}
