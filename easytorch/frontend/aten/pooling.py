"""Pooling over one to three axes, and backwards."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from easytorch.backends.dtypes import DType
from easytorch.backends.graph import Op
from easytorch.backends.shapes import Shape
from easytorch.backends.types import PadAxis, ReduceOpType
from easytorch.frontend.arrays import along, pad, scatter_along, take
from easytorch.frontend.aten.indexing import scatter
from easytorch.frontend.context import Context
from easytorch.frontend.registry import lowering

aten = torch.ops.aten

Sizes = Sequence[int]


def per_axis(values: int | Sizes, count: int) -> tuple[int, ...]:
    """One value per axis; ATen accepts a single one for all."""
    given = (values,) if isinstance(values, int) else tuple(values)
    return given * count if len(given) == 1 else given


class Windows:
    """The windows of a pooling: all sizes are tuples with one entry per pooled axis."""

    def __init__(
        self,
        inputs: Sizes,
        kernel: int | Sizes,
        stride: int | Sizes,
        padding: int | Sizes,
        dilation: int | Sizes = 1,
        ceil_mode: bool = False,
    ) -> None:
        count = len(inputs)
        self.inputs = tuple(inputs)
        self.kernel = per_axis(kernel, count)
        self.stride = per_axis(stride, count) if stride not in ((), []) else self.kernel
        self.padding = per_axis(padding, count)
        self.dilation = per_axis(dilation, count)
        self.outputs = tuple(self._output(axis, ceil_mode) for axis in range(count))

    def _output(self, axis: int, ceil_mode: bool) -> int:
        size, pad, step = self.inputs[axis], self.padding[axis], self.stride[axis]
        room = size + 2 * pad - self.dilation[axis] * (self.kernel[axis] - 1) - 1
        count = (-(-room // step) if ceil_mode else room // step) + 1
        # A window that starts in the padding behind does not count.
        return count - 1 if ceil_mode and (count - 1) * step >= size + pad else count

    def end_padding(self, axis: int) -> int:
        """Padding behind the axis, so that the windows are just covered; negative padding crops."""
        span = (self.outputs[axis] - 1) * self.stride[axis] + self.dilation[axis] * (self.kernel[axis] - 1) + 1
        return span - self.inputs[axis] - self.padding[axis]

    def reduce(self, ctx: Context, x: Op, how: ReduceOpType) -> Op:
        """The reduction of each window of x's last axes; padding is neutral."""
        first = x.shape.rank - len(self.inputs)
        ends = [self.end_padding(axis) for axis in range(len(self.inputs))]
        x = pad(ctx, x, {first + axis: PadAxis(0, min(end, 0)) for axis, end in enumerate(ends)})
        ones = (1,) * first
        return ctx.builder.reduce_window(
            x,
            how,
            (*ones, *self.kernel),
            (*ones, *self.stride),
            None,
            (*ones, *self.dilation),
            [(0, 0)] * first + [(before, max(end, 0)) for before, end in zip(self.padding, ends, strict=True)],
        )

    def places(self) -> np.ndarray:
        """(outputs, kernel): the flat places of the elements of each window; for padding one that is in it too."""
        axes = []
        for axis in range(len(self.inputs)):
            starts = np.arange(self.outputs[axis])[:, None] * self.stride[axis] - self.padding[axis]
            at = starts + np.arange(self.kernel[axis])[None, :] * self.dilation[axis]
            inside = (at >= 0) & (at < self.inputs[axis])
            first = np.take_along_axis(at, np.argmax(inside, axis=1)[:, None], axis=1)
            axes.append(np.where(inside, at, first))
        return _flat(axes, self.inputs)

    def divisors(self, count_include_pad: bool, divisor_override: int | None) -> list[np.ndarray]:
        """By axis, by how many elements the sum of a window is divided."""
        found = []
        for axis, size in enumerate(self.inputs):
            starts = np.arange(self.outputs[axis]) * self.stride[axis] - self.padding[axis]
            ends = np.minimum(starts + self.kernel[axis], size + self.padding[axis])
            inside = np.minimum(ends, size) - np.maximum(starts, 0)
            found.append(ends - starts if count_include_pad else inside)
        if divisor_override is not None:
            found = [np.ones_like(part) for part in found]
            found[0] = found[0] * divisor_override
        return found


def _flat(axes: Sequence[np.ndarray], sizes: Sizes) -> np.ndarray:
    """(outputs, windows): flat places, of the places (outputs of the axis, window) along each axis."""
    flat = np.zeros((1, 1), np.int64)
    for at, size in zip(axes, sizes, strict=True):
        flat = flat[:, None, :, None] * size + at[None, :, None, :]
        flat = flat.reshape(flat.shape[0] * flat.shape[1], -1)
    return flat


def _window_maxima(ctx: Context, x: Op, places: np.ndarray, outputs: Sizes) -> tuple[Op, Op]:
    """The greatest element of each window, the first of several, and its flat place. places: (outputs, window)."""
    b, spatial = ctx.builder, len(outputs)
    lead = x.shape.dimensions[: x.shape.rank - spatial]
    flat = ctx.reshape(x, (*lead, math.prod(x.shape.dimensions[len(lead) :])))
    windows = take(ctx, flat, len(lead), places)
    shape = windows.shape.dimensions
    values = b.reduce_max(windows, len(shape) - 1)
    found = b.equal(windows, b.broadcast_in_dim(values, windows.shape, range(len(shape) - 1)))
    if x.shape.dtype.is_float:
        found = b.logical_or(found, b.is_nan(windows))
    table = ctx.expand(ctx.constant(places), shape)
    outside = ctx.scalar(np.iinfo(np.int64).max, DType.INT64)
    indices = b.reduce_min(b.where(found, table, outside), len(shape) - 1)
    return ctx.reshape(values, (*lead, *outputs)), ctx.reshape(indices, (*lead, *outputs))


def _max_pool(
    ctx: Context, x: Op, spatial: int, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, ceil_mode: bool
) -> tuple[Op, Op]:
    windows = Windows(x.shape.dimensions[-spatial:], kernel, stride, padding, dilation, ceil_mode)
    _, indices = _window_maxima(ctx, x, windows.places(), windows.outputs)
    return windows.reduce(ctx, x, ReduceOpType.MAX), indices


@lowering(aten.max_pool2d_with_indices.default)
def max_pool2d_with_indices(
    ctx: Context,
    x: Op,
    kernel_size: Sizes,
    stride: Sizes = (),
    padding: Sizes = (0,),
    dilation: Sizes = (1,),
    ceil_mode: bool = False,
) -> tuple[Op, Op]:
    return _max_pool(ctx, x, 2, kernel_size, stride, padding, dilation, ceil_mode)


@lowering(aten.max_pool3d_with_indices.default)
def max_pool3d_with_indices(
    ctx: Context,
    x: Op,
    kernel_size: Sizes,
    stride: Sizes = (),
    padding: Sizes = (0,),
    dilation: Sizes = (1,),
    ceil_mode: bool = False,
) -> tuple[Op, Op]:
    return _max_pool(ctx, x, 3, kernel_size, stride, padding, dilation, ceil_mode)


def _plain_max_pool(
    ctx: Context,
    x: Op,
    spatial: int,
    kernel: Sizes,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    ceil_mode: bool,
) -> Op:
    windows = Windows(x.shape.dimensions[-spatial:], kernel, stride, padding, dilation, ceil_mode)
    return windows.reduce(ctx, x, ReduceOpType.MAX)


@lowering(aten.max_pool1d.default)
def max_pool1d(
    ctx: Context,
    x: Op,
    kernel_size: Sizes,
    stride: Sizes = (),
    padding: Sizes = (0,),
    dilation: Sizes = (1,),
    ceil_mode: bool = False,
) -> Op:
    return _plain_max_pool(ctx, x, 1, kernel_size, stride, padding, dilation, ceil_mode)


@lowering(aten.max_pool2d.default)
def max_pool2d(
    ctx: Context,
    x: Op,
    kernel_size: Sizes,
    stride: Sizes = (),
    padding: Sizes = (0,),
    dilation: Sizes = (1,),
    ceil_mode: bool = False,
) -> Op:
    return _plain_max_pool(ctx, x, 2, kernel_size, stride, padding, dilation, ceil_mode)


@lowering(aten.max_pool3d.default)
def max_pool3d(
    ctx: Context,
    x: Op,
    kernel_size: Sizes,
    stride: Sizes = (),
    padding: Sizes = (0,),
    dilation: Sizes = (1,),
    ceil_mode: bool = False,
) -> Op:
    return _plain_max_pool(ctx, x, 3, kernel_size, stride, padding, dilation, ceil_mode)


@lowering(aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default)
def max_pool_backward(
    ctx: Context,
    grad_output: Op,
    x: Op,
    kernel_size: Sizes,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    ceil_mode: bool,
    indices: Op,
) -> Op:
    spatial = 2 if ctx.node is None or "2d" in str(ctx.node.target) else 3
    return _to_places(ctx, grad_output, x, indices, spatial)


@lowering(aten.adaptive_max_pool2d_backward.default, aten.adaptive_max_pool3d_backward.default)
def adaptive_max_pool_backward(ctx: Context, grad_output: Op, x: Op, indices: Op) -> Op:
    spatial = 2 if ctx.node is None or "2d" in str(ctx.node.target) else 3
    return _to_places(ctx, grad_output, x, indices, spatial)


def _to_places(ctx: Context, grad_output: Op, x: Op, indices: Op, spatial: int) -> Op:
    """The gradient of each output, added at the flat place that it came from."""
    b = ctx.builder
    lead = math.prod(x.shape.dimensions[: x.shape.rank - spatial])
    inputs, outputs = (math.prod(op.shape.dimensions[op.shape.rank - spatial :]) for op in (x, indices))
    grads = ctx.wide(ctx.reshape(grad_output, (lead * outputs,)))
    rows = ctx.iota((lead, outputs), 0, indices.shape.dtype)
    flat = b.add(b.mul(rows, ctx.scalar(inputs, indices.shape.dtype)), ctx.reshape(indices, (lead, outputs)))
    zeros = ctx.full((lead * inputs,), 0, grads.shape.dtype)
    result = scatter_along(ctx, zeros, 0, ctx.reshape(flat, (lead * outputs,)), grads)
    return ctx.reshape(ctx.cast(result, x.shape.dtype), x.shape.dimensions)


# --- averages


def _divided(ctx: Context, x: Op, divisors: Sequence[np.ndarray]) -> Op:
    """x by the products of `divisors`, one vector per axis of the last ones."""
    table = divisors[0]
    for part in divisors[1:]:
        table = table[..., None] * part
    divisor = ctx.constant(table.astype(x.shape.dtype.numpy))
    return ctx.builder.div(x, ctx.expand(divisor, x.shape.dimensions))


def _average_pool(
    ctx: Context,
    x: Op,
    spatial: int,
    kernel: Sizes,
    stride: Sizes,
    padding: Sizes,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Op:
    windows = Windows(x.shape.dimensions[-spatial:], kernel, stride, padding, 1, ceil_mode)
    total = windows.reduce(ctx, ctx.wide(x), ReduceOpType.SUM)
    if x.shape.dtype.is_float:
        total = _divided(ctx, total, windows.divisors(count_include_pad, divisor_override))
        return ctx.cast(total, x.shape.dtype)
    return _divided(ctx, total, windows.divisors(count_include_pad, divisor_override))


@lowering(aten.avg_pool1d.default)
def avg_pool1d(
    ctx: Context,
    x: Op,
    kernel_size: Sizes,
    stride: Sizes = (),
    padding: Sizes = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Op:
    return _average_pool(ctx, x, 1, kernel_size, stride, padding, ceil_mode, count_include_pad, None)


@lowering(aten.avg_pool2d.default)
def avg_pool2d(
    ctx: Context,
    x: Op,
    kernel_size: Sizes,
    stride: Sizes = (),
    padding: Sizes = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Op:
    return _average_pool(ctx, x, 2, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


@lowering(aten.avg_pool3d.default)
def avg_pool3d(
    ctx: Context,
    x: Op,
    kernel_size: Sizes,
    stride: Sizes = (),
    padding: Sizes = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Op:
    return _average_pool(ctx, x, 3, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


@lowering(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
def avg_pool_backward(
    ctx: Context,
    grad_output: Op,
    x: Op,
    kernel_size: Sizes,
    stride: Sizes,
    padding: Sizes,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Op:
    """Every element takes the share of each window it is in: windows turned round, over gradients spread by stride."""
    spatial = 2 if ctx.node is None or "2d" in str(ctx.node.target) else 3
    windows = Windows(x.shape.dimensions[-spatial:], kernel_size, stride, padding, 1, ceil_mode)
    shares = _divided(ctx, ctx.wide(grad_output), windows.divisors(count_include_pad, divisor_override))
    first = x.shape.rank - spatial
    config = {}
    for axis in range(spatial):
        before = windows.kernel[axis] - 1 - windows.padding[axis]
        spread = (windows.outputs[axis] - 1) * windows.stride[axis] + 1
        behind = windows.inputs[axis] + windows.kernel[axis] - 1 - before - spread
        config[first + axis] = PadAxis(before, behind, windows.stride[axis] - 1)
    ones = (1,) * x.shape.rank
    result = ctx.builder.reduce_window(
        pad(ctx, shares, config), ReduceOpType.SUM, (*ones[:first], *windows.kernel), ones
    )
    return ctx.cast(result, x.shape.dtype)


# --- windows by the size of the output


def _adaptive_places(size: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(count, longest): the places of each window, the last repeated; (count,): how many there are."""
    starts = np.arange(count) * size // count
    lengths = -(-(np.arange(1, count + 1) * size) // count) - starts
    longest = int(lengths.max()) if count else 1
    return starts[:, None] + np.minimum(np.arange(longest)[None, :], lengths[:, None] - 1), lengths


def _adaptive_average(ctx: Context, x: Op, output_size: int | Sizes, spatial: int) -> Op:
    b, first = ctx.builder, x.shape.rank - spatial
    result = ctx.wide(x)
    for number, count in enumerate(per_axis(output_size, spatial)):
        axis, size = first + number, x.shape.dimensions[first + number]
        if count == size:
            continue
        places, lengths = _adaptive_places(size, count)
        if size % count == 0 and count:
            dimensions = result.shape.dimensions
            windows = ctx.reshape(result, (*dimensions[:axis], count, size // count, *dimensions[axis + 1 :]))
        else:
            windows = take(ctx, result, axis, places)
            counted = np.arange(places.shape[1])[None, :] < lengths[:, None]
            mask = b.broadcast_in_dim(
                ctx.constant(counted), Shape(DType.BOOL, windows.shape.dimensions), (axis, axis + 1)
            )
            windows = b.where(mask, windows, ctx.scalar(0, windows.shape.dtype))
        total = b.reduce_sum(windows, axis + 1)
        divisors = along(ctx, lengths.astype(total.shape.dtype.numpy), total.shape.dimensions, axis)
        result = b.div(total, divisors)
    return ctx.cast(result, x.shape.dtype)


@lowering(aten.adaptive_avg_pool1d.default)
def adaptive_avg_pool1d(ctx: Context, x: Op, output_size: Sizes) -> Op:
    return _adaptive_average(ctx, x, output_size, 1)


@lowering(aten._adaptive_avg_pool2d.default, aten.adaptive_avg_pool2d.default)
def adaptive_avg_pool2d(ctx: Context, x: Op, output_size: Sizes) -> Op:
    return _adaptive_average(ctx, x, output_size, 2)


@lowering(aten._adaptive_avg_pool3d.default, aten.adaptive_avg_pool3d.default)
def adaptive_avg_pool3d(ctx: Context, x: Op, output_size: Sizes) -> Op:
    return _adaptive_average(ctx, x, output_size, 3)


@lowering(aten._adaptive_avg_pool2d_backward.default, aten._adaptive_avg_pool3d_backward.default)
def adaptive_avg_pool_backward(ctx: Context, grad_output: Op, x: Op) -> Op:
    b = ctx.builder
    spatial = 2 if ctx.node is None or "2d" in str(ctx.node.target) else 3
    first = x.shape.rank - spatial
    result = ctx.wide(grad_output)
    for axis in range(first, x.shape.rank):
        size, count = x.shape.dimensions[axis], grad_output.shape.dimensions[axis]
        places, lengths = _adaptive_places(size, count)
        shares = b.div(result, along(ctx, lengths.astype(result.shape.dtype.numpy), result.shape.dimensions, axis))
        counted = np.arange(places.shape[1])[None, :] < lengths[:, None]
        shape = Shape(
            shares.shape.dtype,
            (*shares.shape.dimensions[: axis + 1], places.shape[1], *shares.shape.dimensions[axis + 1 :]),
        )
        windows = b.broadcast_in_dim(shares, shape, [n if n <= axis else n + 1 for n in range(shares.shape.rank)])
        # Outside, where it is left out.
        targets = np.where(counted, places, size)
        dimensions = (*shares.shape.dimensions[:axis], size, *shares.shape.dimensions[axis + 1 :])
        result = scatter_along(ctx, ctx.full(dimensions, 0, shares.shape.dtype), axis, targets, windows)
    return ctx.cast(result, x.shape.dtype)


@lowering(aten.adaptive_max_pool2d.default)
def adaptive_max_pool2d(ctx: Context, x: Op, output_size: Sizes) -> tuple[Op, Op]:
    return _adaptive_max(ctx, x, output_size, 2)


@lowering(aten.adaptive_max_pool3d.default)
def adaptive_max_pool3d(ctx: Context, x: Op, output_size: Sizes) -> tuple[Op, Op]:
    return _adaptive_max(ctx, x, output_size, 3)


def _adaptive_max(ctx: Context, x: Op, output_size: Sizes, spatial: int) -> tuple[Op, Op]:
    outputs = per_axis(output_size, spatial)
    sizes = x.shape.dimensions[-spatial:]
    axes = [_adaptive_places(size, count)[0] for size, count in zip(sizes, outputs, strict=True)]
    return _window_maxima(ctx, x, _flat(axes, sizes), outputs)


@lowering(aten.max_unpool2d.default)
def max_unpool2d(ctx: Context, x: Op, indices: Op, output_size: Sizes) -> Op:
    return _unpooled(ctx, x, indices, output_size)


@lowering(aten.max_unpool3d.default)
def max_unpool3d(ctx: Context, x: Op, indices: Op, output_size: Sizes, stride: Sizes, padding: Sizes) -> Op:
    return _unpooled(ctx, x, indices, output_size)


def _unpooled(ctx: Context, x: Op, indices: Op, output_size: Sizes) -> Op:
    spatial = len(output_size)
    lead = math.prod(x.shape.dimensions[: x.shape.rank - spatial])
    inputs = math.prod(x.shape.dimensions[x.shape.rank - spatial :])
    zeros = ctx.full((lead, math.prod(output_size)), 0, x.shape.dtype)
    rows = (ctx.reshape(part, (lead, inputs)) for part in (indices, x))
    result = scatter(ctx, zeros, 1, *rows)
    return ctx.reshape(result, (*x.shape.dimensions[: x.shape.rank - spatial], *output_size))
