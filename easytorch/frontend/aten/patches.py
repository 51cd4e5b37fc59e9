"""Sliding windows extracted from an array (im2col, unfold), and their inverses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from easytorch.backends.graph import Op
from easytorch.backends.types import PadAxis
from easytorch.frontend.arrays import cut, move, pad, scatter_along, take
from easytorch.frontend.aten.pooling import Windows
from easytorch.frontend.context import Context
from easytorch.frontend.registry import lowering

aten = torch.ops.aten
Sizes = Sequence[int]


@lowering(aten.im2col.default)
def im2col(ctx: Context, x: Op, kernel_size: Sizes, dilation: Sizes, padding: Sizes, stride: Sizes) -> Op:
    """(*N, C, H, W) -> (*N, C * kernel, windows), zeros around."""
    first = x.shape.rank - 2
    x = pad(ctx, x, {first + axis: PadAxis(side, side) for axis, side in enumerate(padding)})
    *batch, channels, height, width = x.shape.dimensions
    windows = Windows((height, width), kernel_size, stride, 0, dilation)
    places = windows.places()
    flat = ctx.reshape(x, (*batch, channels, height * width))
    taken = take(ctx, flat, first, places.T)
    return ctx.reshape(taken, (*batch, channels * places.shape[1], places.shape[0]))


@lowering(aten.col2im.default)
def col2im(
    ctx: Context, x: Op, output_size: Sizes, kernel_size: Sizes, dilation: Sizes, padding: Sizes, stride: Sizes
) -> Op:
    """(*N, C * kernel, windows) -> (*N, C, H, W): overlapping windows are summed."""
    height, width = (size + 2 * side for size, side in zip(output_size, padding, strict=True))
    places = Windows((height, width), kernel_size, stride, 0, dilation).places()
    *batch, rows, count = x.shape.dimensions
    channels, kind = rows // places.shape[1], x.shape.dtype
    split = ctx.wide(ctx.reshape(x, (*batch, channels, places.shape[1], count)))
    zeros = ctx.full((*batch, channels, height * width), 0, split.shape.dtype)
    summed = scatter_along(ctx, zeros, len(batch) + 1, places.T, split)
    image = ctx.reshape(summed, (*batch, channels, height, width))
    for axis, side in enumerate(padding, len(batch) + 1):
        image = cut(ctx, image, axis, side, image.shape.dimensions[axis] - side)
    return ctx.cast(image, kind)


@lowering(aten.unfold.default, aten.unfold_copy.default)
def unfold(ctx: Context, x: Op, dimension: int, size: int, step: int) -> Op:
    """Windows along an axis, their elements in a new last one."""
    if not x.shape.rank:
        return ctx.reshape(x, (size,))
    axis = ctx.axis(dimension, x.shape.rank)
    places = _steps(x.shape.dimensions[axis], size, step)
    return move(ctx, take(ctx, x, axis, places), (axis + 1,), (x.shape.rank,))


@lowering(aten.unfold_backward.default)
def unfold_backward(ctx: Context, grad_in: Op, input_sizes: Sizes, dim: int, size: int, step: int) -> Op:
    if not input_sizes:
        return ctx.reshape(grad_in, ())
    axis, kind = ctx.axis(dim, len(input_sizes)), grad_in.shape.dtype
    windows = ctx.wide(move(ctx, grad_in, (len(input_sizes),), (axis + 1,)))
    zeros = ctx.full(input_sizes, 0, windows.shape.dtype)
    places = _steps(input_sizes[axis], size, step)
    # istft gives the windows of one signal for a batch of them.
    windows = ctx.expand(windows, (*input_sizes[:axis], *places.shape, *input_sizes[axis + 1 :]))
    return ctx.cast(scatter_along(ctx, zeros, axis, places, windows), kind)


def _steps(length: int, size: int, step: int) -> np.ndarray:
    return np.arange((length - size) // step + 1)[:, None] * step + np.arange(size)


@lowering(aten.roll.default)
def roll(ctx: Context, x: Op, shifts: int | Sizes, dims: int | Sizes = ()) -> Op:
    shifts, dims = ((values,) if isinstance(values, int) else tuple(values) for values in (shifts, dims))
    if not x.shape.size:
        return x
    if not dims:
        return ctx.reshape(roll(ctx, ctx.reshape(x, (-1,)), shifts, (0,)), x.shape.dimensions)
    for shift, dim in zip(shifts, dims, strict=True):
        axis = ctx.axis(dim, x.shape.rank)
        size = x.shape.dimensions[axis] if x.shape.rank else 1
        if shift % size:
            middle = size - shift % size
            parts = cut(ctx, x, axis, middle, size), cut(ctx, x, axis, 0, middle)
            x = ctx.builder.concatenate(axis, *parts)
    return x


@lowering(aten.pixel_shuffle.default)
def pixel_shuffle(ctx: Context, x: Op, upscale_factor: int) -> Op:
    """(*, C r^2, H, W) -> (*, C, H r, W r) (Shi et al. 2016)."""
    *batch, channels, height, width = x.shape.dimensions
    factor, first = upscale_factor, len(batch)
    split = ctx.reshape(x, (*batch, channels // factor**2, factor, factor, height, width))
    order = (*range(first + 1), first + 3, first + 1, first + 4, first + 2)
    turned = ctx.transpose(split, order)
    return ctx.reshape(turned, (*batch, channels // factor**2, height * factor, width * factor))


@lowering(aten.pixel_unshuffle.default)
def pixel_unshuffle(ctx: Context, x: Op, downscale_factor: int) -> Op:
    *batch, channels, height, width = x.shape.dimensions
    factor, first = downscale_factor, len(batch)
    split = ctx.reshape(x, (*batch, channels, height // factor, factor, width // factor, factor))
    turned = ctx.transpose(split, (*range(first + 1), first + 2, first + 4, first + 1, first + 3))
    return ctx.reshape(turned, (*batch, channels * factor**2, height // factor, width // factor))
