"""Convolutions of any number of axes, plain and transposed, and backwards."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from easytorch.backends.graph import Op
from easytorch.backends.types import ConvolveAxesConfig, PadAxis
from easytorch.frontend.arrays import along, pad
from easytorch.frontend.context import Context
from easytorch.frontend.registry import lowering

aten = torch.ops.aten

Sizes = Sequence[int]


def _axes(rank: int, kernel_out: int = 0, kernel_in: int = 1, batch: int = 0, channel: int = 1) -> ConvolveAxesConfig:
    spatial = tuple(range(2, rank))
    return ConvolveAxesConfig(batch, channel, spatial, kernel_in, kernel_out, spatial, 0, 1, spatial)


def _per_axis(values: Sizes, count: int) -> tuple[int, ...]:
    return tuple(values) * count if len(values) == 1 else tuple(values)


def _convolved(
    ctx: Context,
    x: Op,
    weight: Op,
    axes: ConvolveAxesConfig,
    strides: Sizes,
    paddings: Sequence[tuple[int, int]],
    spread: Sizes,
    dilation: Sizes,
    groups: int = 1,
    batch_groups: int = 1,
) -> Op:
    """`Builder.conv_general_dilated`, whose paddings may here crop."""
    if any(side < 0 for sides in paddings for side in sides):
        config = zip(axes.input_spatial, paddings, spread, strict=True)
        x = pad(ctx, x, {axis: PadAxis(before, behind, step - 1) for axis, (before, behind), step in config})
        paddings, spread = [(0, 0)] * len(paddings), (1,) * len(paddings)
    return ctx.builder.conv_general_dilated(x, weight, axes, strides, paddings, spread, dilation, groups, batch_groups)


def _plain(ctx: Context, x: Op, weight: Op, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int) -> Op:
    paddings = [(side, side) for side in padding]
    ones = (1,) * len(paddings)
    return _convolved(ctx, x, weight, _axes(x.shape.rank), stride, paddings, ones, dilation, groups)


def _transposed(
    ctx: Context,
    x: Op,
    weight: Op,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    outputs: Sizes,
    groups: int,
) -> Op:
    """The gradient of a convolution to its input, of sizes `outputs`. weight: (C, O / groups, *), as that one's."""
    b, rank = ctx.builder, x.shape.rank
    inner, outer, *kernel = weight.shape.dimensions
    weight = b.reverse(weight, range(2, rank))
    if groups > 1:
        split = ctx.reshape(weight, (groups, inner // groups, outer, *kernel))
        turned = ctx.transpose(split, (0, 2, 1, *range(3, rank + 1)))
        weight, axes = ctx.reshape(turned, (groups * outer, inner // groups, *kernel)), _axes(rank)
    else:
        axes = _axes(rank, kernel_out=1, kernel_in=0)
    paddings = []
    for axis, size in enumerate(outputs):
        reach = dilation[axis] * (kernel[axis] - 1)
        before = reach - padding[axis]
        spread = (x.shape.dimensions[2 + axis] - 1) * stride[axis] + 1
        paddings.append((before, size + reach - spread - before))
    return _convolved(ctx, x, weight, axes, (1,) * len(kernel), paddings, stride, dilation, groups)


def _weight_gradient(
    ctx: Context, x: Op, grad: Op, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int
) -> Op:
    """(O, C / groups, *kernel): x (N, C, *) against grad (N, O, *), batch and channels changing places."""
    rank = x.shape.rank
    axes = _axes(rank, kernel_out=1, kernel_in=0, batch=1, channel=0)
    paddings = []
    for axis, size in enumerate(kernel):
        reach = dilation[axis] * (size - 1) + stride[axis] * (grad.shape.dimensions[2 + axis] - 1) + 1
        paddings.append((padding[axis], reach - x.shape.dimensions[2 + axis] - padding[axis]))
    ones = (1,) * len(paddings)
    found = _convolved(ctx, x, grad, axes, dilation, paddings, ones, stride, 1, groups)
    return ctx.transpose(found, (1, 0, *range(2, rank)))


@lowering(aten.convolution.default)
def convolution(
    ctx: Context,
    x: Op,
    weight: Op,
    bias: Op | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
) -> Op:
    """x (N, C, *), weight (O, C / groups, *), or (C, O / groups, *) if transposed; bias (O,)."""
    spatial = x.shape.rank - 2
    stride, padding, dilation, extra = (
        _per_axis(values, spatial) for values in (stride, padding, dilation, output_padding)
    )
    if transposed:
        outputs = [
            (x.shape.dimensions[2 + axis] - 1) * stride[axis]
            - 2 * padding[axis]
            + dilation[axis] * (weight.shape.dimensions[2 + axis] - 1)
            + extra[axis]
            + 1
            for axis in range(spatial)
        ]
        result = _transposed(ctx, x, weight, stride, padding, dilation, outputs, groups)
    else:
        result = _plain(ctx, x, weight, stride, padding, dilation, groups)
    if bias is None:
        return result
    return ctx.builder.add(result, along(ctx, bias, result.shape.dimensions, 1))


@lowering(aten.convolution_backward.default)
def convolution_backward(
    ctx: Context,
    grad_output: Op,
    x: Op,
    weight: Op,
    bias_sizes: Sizes | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Op | None, ...]:
    """The gradients to x, weight and bias, where `output_mask` asks for them."""
    spatial = x.shape.rank - 2
    stride, padding, dilation = (_per_axis(values, spatial) for values in (stride, padding, dilation))
    kernel = weight.shape.dimensions[2:]
    to_x = to_weight = to_bias = None
    if output_mask[0] and transposed:
        to_x = _plain(ctx, grad_output, weight, stride, padding, dilation, groups)
    elif output_mask[0]:
        to_x = _transposed(ctx, grad_output, weight, stride, padding, dilation, x.shape.dimensions[2:], groups)
    if output_mask[1]:
        wide, narrow = (grad_output, x) if transposed else (x, grad_output)
        to_weight = _weight_gradient(ctx, wide, narrow, kernel, stride, padding, dilation, groups)
    if output_mask[2]:
        axes = [0, *range(2, grad_output.shape.rank)]
        to_bias = ctx.cast(ctx.builder.reduce_sum(ctx.wide(grad_output), axes), grad_output.shape.dtype)
    return to_x, to_weight, to_bias
