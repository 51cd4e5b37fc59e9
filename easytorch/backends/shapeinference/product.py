"""Products: dot, convolution, Fourier transforms and triangular solves."""

from __future__ import annotations

from easytorch.backends.dtypes import COMPLEX, FLOATS, SIGNED, UNSIGNED, DType
from easytorch.backends.errors import BackendError
from easytorch.backends.shapeinference.rule import Rule, require_axis, require_dtype, require_same_dtype, takes
from easytorch.backends.shapeinference.windows import window_sizes
from easytorch.backends.shapes import Shape
from easytorch.backends.types import ConvolveAxesConfig, FFTType, OpType

_NUMBERS = (*SIGNED, *UNSIGNED, *FLOATS, *COMPLEX)


@takes(_NUMBERS, "integers, floats and complex numbers")
def _dot(x0: Shape, x1: Shape) -> Shape | tuple[Shape, ...]:
    if x0.rank not in (1, 2) or x1.rank not in (1, 2) or (x0.rank, x1.rank) == (1, 2):
        raise BackendError("it takes two vectors, a matrix and a vector, or two matrices; see `dot_general`")
    return _dot_general(x0, x1, (x0.rank - 1,), (), (0,), ())


@takes(_NUMBERS, "integers, floats and complex numbers")
def _dot_general(
    lhs: Shape,
    rhs: Shape,
    lhs_contracting_axes: tuple[int, ...],
    lhs_batch_axes: tuple[int, ...],
    rhs_contracting_axes: tuple[int, ...],
    rhs_batch_axes: tuple[int, ...],
) -> Shape:
    require_same_dtype(lhs, rhs)
    for name, one, other in (
        ("contracting", lhs_contracting_axes, rhs_contracting_axes),
        ("batch", lhs_batch_axes, rhs_batch_axes),
    ):
        if len(one) != len(other):
            raise BackendError(f"{len(one)} {name} axes of lhs go with {len(other)} of rhs")
        for left, right in zip(one, other, strict=True):
            require_axis(lhs, left, f"lhs_{name}_axes:")
            require_axis(rhs, right, f"rhs_{name}_axes:")
            if lhs.dimensions[left] != rhs.dimensions[right]:
                sizes = f"{lhs.dimensions[left]} and {rhs.dimensions[right]}"
                raise BackendError(f"the {name} axes {left} of lhs and {right} of rhs have different sizes, {sizes}")
    sides = []
    for name, shape, used in (
        ("lhs", lhs, (*lhs_contracting_axes, *lhs_batch_axes)),
        ("rhs", rhs, (*rhs_contracting_axes, *rhs_batch_axes)),
    ):
        if len(set(used)) != len(used):
            raise BackendError(f"an axis of {name} is used twice: {used}")
        sides.append(tuple(size for axis, size in enumerate(shape.dimensions) if axis not in used))
    batch = tuple(lhs.dimensions[axis] for axis in lhs_batch_axes)
    return Shape(lhs.dtype, (*batch, *sides[0], *sides[1]))


@takes(_NUMBERS, "integers, floats and complex numbers")
def _convolution(
    operand: Shape,
    filter: Shape,
    axes: ConvolveAxesConfig,
    strides: tuple[int, ...],
    paddings: tuple[tuple[int, ...], ...],
    input_dilation: tuple[int, ...],
    filter_dilation: tuple[int, ...],
    filter_group_count: int,
    batch_group_count: int,
) -> Shape:
    require_same_dtype(operand, filter)
    _check_axes("input", operand, (axes.input_batch, axes.input_channel, *axes.input_spatial))
    _check_axes("kernel", filter, (axes.kernel_input_channel, axes.kernel_output_channel, *axes.kernel_spatial))
    outputs = (axes.output_batch, axes.output_channel, *axes.output_spatial)
    _check_axes("output", Shape(operand.dtype, (1,) * operand.rank), outputs)
    if operand.rank != filter.rank:
        raise BackendError("operand and filter must have the same number of axes")
    channels, kernel_channels = operand.dimensions[axes.input_channel], filter.dimensions[axes.kernel_input_channel]
    features, batch = filter.dimensions[axes.kernel_output_channel], operand.dimensions[axes.input_batch]
    if filter_group_count < 1 or batch_group_count < 1 or min(filter_group_count, batch_group_count) > 1:
        raise BackendError("group counts are 1 or more, and only one of them more than 1")
    if channels != kernel_channels * filter_group_count:
        raise BackendError(
            f"{channels} input channels, the filter takes {kernel_channels} in each of {filter_group_count} groups"
        )
    if features % filter_group_count or features % batch_group_count or batch % batch_group_count:
        raise BackendError(
            f"{features} output channels or a batch of {batch} cannot be split into "
            f"{filter_group_count} filter and {batch_group_count} batch groups"
        )
    spatial = window_sizes(
        tuple(operand.dimensions[axis] for axis in axes.input_spatial),
        tuple(filter.dimensions[axis] for axis in axes.kernel_spatial),
        strides,
        input_dilation,
        filter_dilation,
        paddings,
    )
    sizes = dict(zip(outputs, (batch // batch_group_count, features, *spatial), strict=True))
    return Shape(operand.dtype, tuple(sizes[axis] for axis in range(operand.rank)))


def _check_axes(name: str, shape: Shape, axes: tuple[int, ...]) -> None:
    if sorted(axes) != list(range(shape.rank)):
        raise BackendError(f"the {name} axes {axes} are not every one of {shape.rank} axes once")


@takes((DType.FLOAT32, DType.FLOAT64, *COMPLEX), "float32, float64 and complex numbers")
def _fft(operand: Shape, fft_type: FFTType, fft_length: tuple[int, ...]) -> Shape:
    if not 1 <= len(fft_length) <= 3:
        raise BackendError(f"fft_length has {len(fft_length)} entries; it takes 1 to 3 axes")
    if operand.rank < len(fft_length) or any(length < 1 for length in fft_length):
        raise BackendError(f"fft_length {fft_length} does not match the last axes of {operand}")
    last = operand.dimensions[-len(fft_length) :]
    if fft_type is FFTType.FORWARD_REAL:
        require_dtype(operand, (DType.FLOAT32, DType.FLOAT64), "float32 and float64")
        _lengths(last, fft_length)
        return Shape(operand.dtype.complex, (*operand.dimensions[:-1], fft_length[-1] // 2 + 1))
    require_dtype(operand, COMPLEX, "complex numbers")
    if fft_type is FFTType.INVERSE_REAL:
        _lengths(last, (*fft_length[:-1], fft_length[-1] // 2 + 1))
        return Shape(operand.dtype.real, (*operand.dimensions[:-1], fft_length[-1]))
    _lengths(last, fft_length)
    return operand


def _lengths(given: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if given != wanted:
        raise BackendError(f"its last axes must have the sizes {wanted}")


@takes((*FLOATS, *COMPLEX), "floats and complex numbers")
def _triangular_solve(a: Shape, b: Shape, left_side: bool, lower: bool, unit_diagonal: bool, adjoint: bool) -> Shape:
    require_same_dtype(a, b)
    if a.rank < 2 or a.rank != b.rank or a.dimensions[:-2] != b.dimensions[:-2]:
        raise BackendError("a and b are matrices in their last two axes, with the same axes before them")
    if a.dimensions[-1] != a.dimensions[-2]:
        raise BackendError(f"the matrices of {a} are not square")
    if b.dimensions[-2 if left_side else -1] != a.dimensions[-1]:
        side = "rows" if left_side else "columns"
        raise BackendError(f"the matrices of b must have {a.dimensions[-1]} {side}")
    return b


RULES: dict[OpType, Rule] = {
    OpType.DOT: _dot,
    OpType.DOT_GENERAL: _dot_general,
    OpType.CONV_GENERAL_DILATED: _convolution,
    OpType.FFT: _fft,
    OpType.TRIANGULAR_SOLVE: _triangular_solve,
}
