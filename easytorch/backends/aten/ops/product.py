"""Products: dot, convolution and Fourier transforms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from easytorch.backends.aten.node_context import Binder, Kernel, NodeContext
from easytorch.backends.aten.ops.movement import padder
from easytorch.backends.aten.ops.windows import windows
from easytorch.backends.aten.storage_dtypes import is_float8, is_narrow, narrow, wide
from easytorch.backends.dtypes import DType
from easytorch.backends.shapes import Shape
from easytorch.backends.types import ConvolveAxesConfig, FFTType, OpType, PadAxis

_CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {
    1: torch.nn.functional.conv1d,
    2: torch.nn.functional.conv2d,
    3: torch.nn.functional.conv3d,
}


def _widened(dtype: DType, function: Kernel) -> Kernel:
    """float8 in float32; ATen itself accumulates the other narrow floats so."""
    if not is_float8(dtype):
        return function
    return lambda *xs: narrow(function(*(wide(x, dtype) for x in xs)), dtype)


def _dot(context: NodeContext) -> Kernel:
    lhs, rhs = context.shapes
    return _widened(context.dtype, _contraction(context, lhs, rhs, (lhs.rank - 1,), (), (0,), ()))


def _dot_general(context: NodeContext) -> Kernel:
    names = ("lhs_contracting_axes", "lhs_batch_axes", "rhs_contracting_axes", "rhs_batch_axes")
    lhs, rhs = context.shapes
    return _widened(context.dtype, _contraction(context, lhs, rhs, *(context.attributes[name] for name in names)))


def _contraction(
    context: NodeContext,
    lhs: Shape,
    rhs: Shape,
    lhs_contracting: Sequence[int],
    lhs_batch: Sequence[int],
    rhs_contracting: Sequence[int],
    rhs_batch: Sequence[int],
) -> Kernel:
    lhs_free = [axis for axis in range(lhs.rank) if axis not in (*lhs_contracting, *lhs_batch)]
    rhs_free = [axis for axis in range(rhs.rank) if axis not in (*rhs_contracting, *rhs_batch)]
    multiply = _matmul(context)
    output = context.output.dimensions
    if not lhs_batch and len(rhs_free) == 1 and len(rhs_contracting) == 1 and lhs_contracting == (lhs.rank - 1,):
        # A linear layer: ATen takes the leading axes as they are.
        if rhs_contracting == (1,) and multiply is torch.matmul:
            return torch.nn.functional.linear
        return multiply if rhs_contracting == (0,) else lambda x0, x1: multiply(x0, x1.t())
    left, right = (*lhs_batch, *lhs_free, *lhs_contracting), (*rhs_batch, *rhs_contracting, *rhs_free)
    batch = [lhs.dimensions[axis] for axis in lhs_batch]
    rows, columns = (
        math.prod(shape.dimensions[axis] for axis in axes) for shape, axes in ((lhs, lhs_free), (rhs, rhs_free))
    )
    depth = math.prod(lhs.dimensions[axis] for axis in lhs_contracting)
    left_shape, right_shape = (*batch, rows, depth), (*batch, depth, columns)

    def contract(x0: Tensor, x1: Tensor) -> Tensor:
        product = multiply(x0.permute(left).reshape(left_shape), x1.permute(right).reshape(right_shape))
        return product.reshape(output)

    return contract


def _matmul(context: NodeContext) -> Callable[[Tensor, Tensor], Tensor]:
    if context.device.type == "cpu" or not context.dtype.is_integer:
        return torch.matmul
    # Accelerators have no matrix product of integers in ATen: float64 is exact for sums of 2**21 products of 16 bits.
    if context.dtype.bits <= 16 and max(shape.size for shape in context.shapes) <= 2**21:
        return lambda x0, x1: torch.matmul(x0.to(torch.float64), x1.to(torch.float64)).to(torch.int64).to(x0.dtype)
    return lambda x0, x1: torch.sum(x0.unsqueeze(-1) * x1.unsqueeze(-3), -2, dtype=x0.dtype)


def _convolution(context: NodeContext) -> Kernel:
    axes: ConvolveAxesConfig = context.attributes["axes"]
    lhs, rhs, output = *context.shapes, context.output
    batch_groups = context.attributes["batch_group_count"]
    groups = context.attributes["filter_group_count"] * batch_groups
    spatial = len(axes.input_spatial)
    batch = lhs.dimensions[axes.input_batch] // batch_groups
    sizes = (batch, lhs.dimensions[axes.input_channel] * batch_groups, *(lhs.dimensions[a] for a in axes.input_spatial))
    config = [
        PadAxis(start, end, dilation - 1)
        for (start, end), dilation in zip(
            context.attributes["paddings"], context.attributes["input_dilation"], strict=True
        )
    ]
    to_input = (axes.input_batch, axes.input_channel, *axes.input_spatial)
    to_kernel = (axes.kernel_output_channel, axes.kernel_input_channel, *axes.kernel_spatial)
    to_output = _inverse((axes.output_batch, axes.output_channel, *axes.output_spatial))
    if 0 in output.dimensions or 0 in lhs.dimensions or 0 in rhs.dimensions:
        return lambda x, w: x.new_zeros(output.dimensions)
    symmetric = all(pad.start == pad.end >= 0 and not pad.interior for pad in config)
    padding = [pad.start for pad in config] if symmetric else [0] * spatial
    pad = None if symmetric else padder(sizes, (PadAxis(), PadAxis(), *config), 0)
    native = 1 <= spatial <= 3 and not context.dtype.is_integer
    if not native and pad is None:
        pad, padding = padder(sizes, (PadAxis(), PadAxis(), *config), 0), [0] * spatial
    strides, dilations = context.attributes["strides"], context.attributes["filter_dilation"]
    multiply = _matmul(context)

    def convolve(x: Tensor, w: Tensor) -> Tensor:
        x, w = x.permute(to_input), w.permute(to_kernel)
        if batch_groups > 1:
            # Parts of the batch become groups of channels: each meets its own part of the filters.
            x = x.reshape(batch_groups, -1, *x.shape[1:]).transpose(0, 1).flatten(1, 2)
        if pad is not None:
            x = pad(x, x.new_zeros(()))
        if native:
            result = _CONVOLUTIONS[spatial](x, w, None, strides, padding, dilations, groups)
        else:
            result = _by_windows(x, w, strides, dilations, groups, multiply)
        return result.permute(to_output)

    return _widened(context.dtype, convolve)


def _by_windows(
    x: Tensor,
    w: Tensor,
    strides: Sequence[int],
    dilations: Sequence[int],
    groups: int,
    multiply: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """A convolution as one matrix product, for what ATen has none: integers, and more or fewer than 1 to 3 axes.

    x (N, G*C, *spatial), w (G*O, C, *kernel) -> (N, G*O, *positions).
    """
    spatial = len(strides)
    batch, features = x.shape[0], w.shape[0]
    seen = windows(x, (1, 1, *w.shape[2:]), (1, 1, *strides), (1, 1, *dilations), keep=2)
    places = seen.shape[2 : 2 + spatial]
    # (N, G*C, *places, *kernel) -> (N, G, places, C*kernel)
    seen = seen.reshape(batch, groups, -1, math.prod(places), math.prod(w.shape[2:])).transpose(2, 3).flatten(3)
    filters = w.reshape(groups, features // groups, -1)
    product = multiply(seen, filters.transpose(1, 2))
    return product.transpose(2, 3).reshape(batch, features, *places)


def _inverse(permutation: Sequence[int]) -> list[int]:
    return sorted(range(len(permutation)), key=permutation.__getitem__)


def _fft(context: NodeContext) -> Kernel:
    length: tuple[int, ...] = context.attributes["fft_length"]
    axes = tuple(range(-len(length), 0))
    kind = context.attributes["fft_type"]
    if 0 in context.operand.dimensions:
        dtype = context.output.dtype.value
        return lambda x: x.new_zeros(context.output.dimensions, dtype=getattr(torch, dtype))
    function: Callable[..., Tensor] = {
        FFTType.FORWARD: torch.fft.fftn,
        FFTType.INVERSE: torch.fft.ifftn,
        FFTType.FORWARD_REAL: torch.fft.rfftn,
        FFTType.INVERSE_REAL: torch.fft.irfftn,
    }[kind]
    return lambda x: function(x, length, axes)


def _triangular_solve(context: NodeContext) -> Kernel:
    attributes, dtype = context.attributes, context.dtype
    lower, adjoint = attributes["lower"], attributes["adjoint"]

    def solve(a: Tensor, b: Tensor) -> Tensor:
        matrix, given = wide(a, dtype), wide(b, dtype)
        found = torch.linalg.solve_triangular(
            matrix.mH if adjoint else matrix,
            given,
            upper=lower is adjoint,
            left=attributes["left_side"],
            unitriangular=attributes["unit_diagonal"],
        )
        return narrow(found, dtype) if is_narrow(dtype) else found

    return solve


PRODUCT: dict[OpType, Binder] = {
    OpType.TRIANGULAR_SOLVE: _triangular_solve,
    OpType.DOT: _dot,
    OpType.DOT_GENERAL: _dot_general,
    OpType.CONV_GENERAL_DILATED: _convolution,
    OpType.FFT: _fft,
}
