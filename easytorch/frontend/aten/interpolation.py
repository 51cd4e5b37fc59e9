"""Resampling on regular grids, forward and backward: each output is a weighted sum of a few inputs, axis by axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from easytorch.backends.dtypes import DType
from easytorch.backends.graph import Op
from easytorch.backends.shapes import Shape
from easytorch.frontend.arrays import along, scatter_along, take
from easytorch.frontend.aten.storage import fake_of
from easytorch.frontend.context import Context
from easytorch.frontend.registry import lowering

aten = torch.ops.aten


class Taps(NamedTuple):
    """(outputs, taps): the inputs along an axis that an output is made of, and their weights; None is 1."""

    places: np.ndarray
    weights: np.ndarray | None


# (size, outputs, align_corners, given scale or None) -> taps
Filter = Callable[[int, int, bool, float | None], Taps]


def _nearest(size: int, count: int, align_corners: bool, scale: float | None) -> Taps:
    """The index of the nearest input, computed in float32."""
    step = np.float32(1 / scale) if scale else np.float32(size) / np.float32(count)
    places = np.floor(np.arange(count, dtype=np.float32) * step).astype(np.int64)
    return Taps(np.minimum(places, size - 1)[:, None], None)


def _nearest_of_sizes(size: int, count: int, align_corners: bool, scale: float | None) -> Taps:
    """The same by the kernels of ATen that repeat once or twice by the sizes, whatever the scale says."""
    if count in (size, 2 * size):
        return Taps(np.arange(count)[:, None] // (count // max(size, 1)), None)
    return _nearest(size, count, align_corners, scale)


def _nearest_exact(size: int, count: int, align_corners: bool, scale: float | None) -> Taps:
    step = np.float32(1 / scale) if scale else np.float32(size) / np.float32(count)
    places = np.floor((np.arange(count, dtype=np.float32) + np.float32(0.5)) * step).astype(np.int64)
    return Taps(np.minimum(places, size - 1)[:, None], None)


def _sources(size: int, count: int, align_corners: bool, scale: float | None) -> np.ndarray:
    """(count,): the input coordinate of each output."""
    at = np.arange(count)
    if align_corners:
        return at * ((size - 1) / (count - 1) if count > 1 else 0.0)
    return (at + 0.5) * (1 / scale if scale else size / count) - 0.5


def _linear(size: int, count: int, align_corners: bool, scale: float | None) -> Taps:
    source = np.maximum(_sources(size, count, align_corners, scale), 0)
    first = np.minimum(np.floor(source).astype(np.int64), size - 1)
    share = np.clip(source - first, 0, 1)
    places = np.stack([first, np.minimum(first + 1, size - 1)], axis=1)
    return Taps(places, np.stack([1 - share, share], axis=1))


def _cubic(size: int, count: int, align_corners: bool, scale: float | None) -> Taps:
    source = _sources(size, count, align_corners, scale)
    first = np.floor(source).astype(np.int64)
    places = np.clip(first[:, None] + np.arange(-1, 3), 0, size - 1)
    distance = np.abs(np.arange(-1, 3) - (source - first)[:, None])
    return Taps(places, _keys(distance, -0.75))


def _keys(distance: np.ndarray, a: float) -> np.ndarray:
    """The cubic convolution kernel (Keys 1981) at distances from 0."""
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0))


def _antialiased(kernel: Callable[[np.ndarray], np.ndarray], reach: float) -> Filter:
    """The kernel stretched by how much smaller the output is, as Pillow's."""

    def taps(size: int, count: int, align_corners: bool, scale: float | None) -> Taps:
        if align_corners:
            step = (size - 1) / (count - 1) if count > 1 else 0.0
        else:
            step = 1 / scale if scale else size / count
        stretch = max(step, 1.0)
        centers = step * (np.arange(count) + 0.5)
        starts = np.maximum((centers - reach * stretch + 0.5).astype(np.int64), 0)
        ends = np.minimum((centers + reach * stretch + 0.5).astype(np.int64), size)
        longest = int((ends - starts).max()) if count else 1
        places = starts[:, None] + np.arange(longest)
        weights = kernel(np.abs((places - centers[:, None] + 0.5) / stretch))
        weights = np.where(places < ends[:, None], weights, 0)
        return Taps(np.minimum(places, size - 1), weights / weights.sum(axis=1, keepdims=True))

    return taps


_FILTERS: dict[str, Filter] = {
    "nearest": _nearest,
    "nearest_of_sizes": _nearest_of_sizes,
    "nearest_exact": _nearest_exact,
    "linear": _linear,
    "cubic": _cubic,
    "linear_aa": _antialiased(lambda distance: np.maximum(1 - distance, 0), 1.0),
    "cubic_aa": _antialiased(lambda distance: _keys(distance, -0.5), 2.0),
}


def _resample_axis(ctx: Context, x: Op, axis: int, taps: Taps) -> Op:
    b, (count, width) = ctx.builder, taps.places.shape
    size = x.shape.dimensions[axis]
    if taps.weights is None:
        times, rest = divmod(count, size)
        if not rest and np.array_equal(taps.places[:, 0], np.arange(count) // times):
            dimensions = (*x.shape.dimensions[: axis + 1], times, *x.shape.dimensions[axis + 1 :])
            kept = [number if number <= axis else number + 1 for number in range(x.shape.rank)]
            repeated = b.broadcast_in_dim(x, Shape(x.shape.dtype, dimensions), kept)
            return ctx.reshape(repeated, (*x.shape.dimensions[:axis], count, *x.shape.dimensions[axis + 1 :]))
        return take(ctx, x, axis, taps.places[:, 0])
    total: Op | None = None
    for number in range(width):
        part = take(ctx, x, axis, taps.places[:, number])
        weights = taps.weights[:, number].astype(x.shape.dtype.numpy)
        part = b.mul(part, along(ctx, weights, part.shape.dimensions, axis))
        total = part if total is None else b.add(total, part)
    assert total is not None
    return total


# Height and width together up to which ATen's CPU takes the kernel that repeats by sizes (UpSampleKernel.cpp).
_SMALL_IMAGE = 128
_CHANNELS_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


def _repeats_by_sizes(ctx: Context, x: Op, output_size: Sequence[int]) -> bool:
    """Whether ATen's CPU takes that kernel for "nearest" forward: for small images, and for channels that lie last."""
    spatial, fake = len(output_size), fake_of(ctx)
    if spatial == 2 and sum(output_size) <= _SMALL_IMAGE:
        return True
    layout = _CHANNELS_LAST.get(spatial)
    return bool(layout and fake is not None and x.shape.dimensions[1] > 3 and fake.is_contiguous(memory_format=layout))


def _spread_axis(ctx: Context, grad: Op, axis: int, size: int, taps: Taps) -> Op:
    """The gradient of `_resample_axis`."""
    dimensions = (*grad.shape.dimensions[:axis], size, *grad.shape.dimensions[axis + 1 :])
    total = ctx.full(dimensions, 0, grad.shape.dtype)
    for number in range(taps.places.shape[1]):
        part = grad
        if taps.weights is not None:
            weights = taps.weights[:, number].astype(grad.shape.dtype.numpy)
            part = ctx.builder.mul(grad, along(ctx, weights, grad.shape.dimensions, axis))
        total = scatter_along(ctx, total, axis, taps.places[:, number], part)
    return total


def _upsample(
    ctx: Context, x: Op, output_size: Sequence[int], scales: Sequence[float | None], kind: str, align_corners: bool
) -> Op:
    first = x.shape.rank - len(output_size)
    exact = kind.startswith("nearest")
    if kind == "nearest" and _repeats_by_sizes(ctx, x, output_size):
        kind = "nearest_of_sizes"
    result = x if exact else ctx.wide(x if x.shape.dtype.is_float else ctx.cast(x, DType.FLOAT32))
    # The last axis first, as ATen: it does not matter but for rounding.
    for number in reversed(range(len(output_size))):
        axis, count = first + number, output_size[number]
        taps = _FILTERS[kind](x.shape.dimensions[axis], count, align_corners, scales[number])
        if x.shape.dimensions[axis] == count and np.array_equal(taps.places[:, 0], np.arange(count)) and exact:
            continue
        result = _resample_axis(ctx, result, axis, taps)
    if not exact and not x.shape.dtype.is_float:
        limits = (ctx.scalar(value, result.shape.dtype) for value in (0.0, 255.0))
        low, high = limits
        result = ctx.builder.clamp(low, ctx.builder.round(result), high)
    return ctx.cast(result, x.shape.dtype)


def _register(name: str, spatial: int, kind: str, corners: bool) -> None:
    """The overloads of one `upsample_*`: by sizes, by sizes or factors (vec), and backwards."""
    packet = getattr(aten, name)

    def by_sizes(ctx: Context, x: Op, output_size: Sequence[int], *rest: Any, **named: Any) -> Op:
        align_corners, scales = _settings(rest, named, corners, spatial)
        return _upsample(ctx, x, output_size, scales, kind, align_corners)

    def by_factors(ctx: Context, x: Op, output_size: Sequence[int] | None, *rest: Any, **named: Any) -> Op:
        align_corners = bool(rest[0]) if corners else False
        factors = named.get("scale_factors", rest[-1] if len(rest) > int(corners) else None)
        sizes = x.shape.dimensions[-spatial:]
        if output_size is None:
            assert factors is not None, "torch asks for sizes or factors"
            output_size = [math.floor(size * factor) for size, factor in zip(sizes, factors, strict=True)]
        return _upsample(ctx, x, output_size, factors or [None] * spatial, kind, align_corners)

    def backward(
        ctx: Context, grad: Op, output_size: Sequence[int], input_size: Sequence[int], *rest: Any, **named: Any
    ) -> Op:
        align_corners, scales = _settings(rest, named, corners, spatial)
        result = ctx.wide(grad)
        for number in range(spatial):
            axis = grad.shape.rank - spatial + number
            size = input_size[axis]
            # ATen's backward repeats by sizes, also where its forward did not
            of = "nearest_of_sizes" if kind == "nearest" else kind
            taps = _FILTERS[of](size, output_size[number], align_corners, scales[number])
            result = _spread_axis(ctx, result, axis, size, taps)
        return ctx.cast(result, grad.shape.dtype)

    lowering(packet.default)(by_sizes)
    lowering(packet.vec)(by_factors)
    lowering(getattr(aten, f"{name}_backward").default)(backward)


def _settings(
    rest: Sequence[Any], named: dict[str, Any], corners: bool, spatial: int
) -> tuple[bool, list[float | None]]:
    """align_corners and a scale for each axis, of the last arguments."""
    given = list(rest)
    align_corners = bool(given.pop(0)) if corners and given else bool(named.get("align_corners", False))
    names = ["scales"] if spatial == 1 else ["scales_d", "scales_h", "scales_w"][-spatial:]
    given += [None] * (spatial - len(given))
    return align_corners, [named.get(name, value) for name, value in zip(names, given, strict=True)]


_NAMES: list[tuple[str, int, str, bool]] = [
    *((f"upsample_nearest{count}d", count, "nearest", False) for count in (1, 2, 3)),
    *((f"_upsample_nearest_exact{count}d", count, "nearest_exact", False) for count in (1, 2, 3)),
    ("upsample_linear1d", 1, "linear", True),
    ("upsample_bilinear2d", 2, "linear", True),
    ("upsample_trilinear3d", 3, "linear", True),
    ("upsample_bicubic2d", 2, "cubic", True),
    ("_upsample_bilinear2d_aa", 2, "linear_aa", True),
    ("_upsample_bicubic2d_aa", 2, "cubic_aa", True),
]
for _entry in _NAMES:
    _register(*_entry)
