"""Sampling at coordinates that are data (Jaderberg et al. 2015)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from easytorch.backends.dtypes import DType
from easytorch.backends.graph import Op
from easytorch.frontend.context import Context
from easytorch.frontend.registry import lowering

aten = torch.ops.aten

_BILINEAR, _NEAREST, _BICUBIC = range(3)
_ZEROS, _BORDER, _REFLECTION = range(3)


class _Sampler:
    """The values of x (N, C, *sizes) at coordinates (N, *outputs), one array per axis."""

    def __init__(self, ctx: Context, x: Op, padding_mode: int, align_corners: bool) -> None:
        self.ctx, self.b, self.x = ctx, ctx.builder, x
        self.sizes = x.shape.dimensions[2:]
        self.padding_mode, self.align_corners = padding_mode, align_corners

    def number(self, value: float) -> Op:
        return self.ctx.scalar(value, self.x.shape.dtype)

    def unnormalized(self, at: Op, size: int) -> Op:
        """Coordinates in [-1, 1] as (fractional) indices of the inputs."""
        b, number = self.b, self.number
        if self.align_corners:
            return b.mul(b.add(at, number(1)), number((size - 1) / 2))
        return b.div(b.sub(b.mul(b.add(at, number(1)), number(size)), number(1)), number(2))

    def bounded(self, at: Op, size: int) -> Op:
        """Out-of-bounds coordinates mapped inside by the padding mode; for zeros they are masked when read."""
        b, number = self.b, self.number
        if self.padding_mode == _ZEROS:
            return at
        if self.padding_mode == _REFLECTION:
            low, high = (0.0, size - 1.0) if self.align_corners else (-0.5, size - 0.5)
            span = high - low
            if span <= 0:
                return b.mul(at, number(0))
            distance = b.abs(b.sub(at, number(low)))
            turns = b.floor(b.div(distance, number(span)))
            rest = b.rem(distance, number(span))
            even = b.equal(b.rem(turns, number(2)), number(0))
            at = b.add(b.where(even, rest, b.sub(number(span), rest)), number(low))
        return b.clamp(number(0), at, number(size - 1))

    def read(self, places: Sequence[Op]) -> Op:
        """(N, C, *outputs) at integer places (N, *outputs), zeros outside."""
        b, ctx = self.b, self.ctx
        outputs = places[0].shape.dimensions
        inside: Op | None = None
        columns = [ctx.iota(outputs, 0, DType.INT32)]
        for place, size in zip(places, self.sizes, strict=True):
            here = b.logical_and(
                b.greater_or_equal(place, self.number(0)), b.less_or_equal(place, self.number(size - 1))
            )
            inside = here if inside is None else b.logical_and(inside, here)
            columns.append(b.convert_dtype(b.clamp(self.number(0), place, self.number(size - 1)), DType.INT32))
        rank, axes = len(outputs), (0, *range(2, self.x.shape.rank))
        vectors = b.concatenate(rank, *(ctx.reshape(column, (*outputs, 1)) for column in columns))
        sizes = [1] * self.x.shape.rank
        sizes[1] = self.x.shape.dimensions[1]
        found = b.gather(self.x, vectors, rank, (1,), axes, axes, sizes)
        assert inside is not None
        mask = b.broadcast_in_dim(inside, found.shape.with_dtype(DType.BOOL), (0, *range(2, rank + 1)))
        return b.where(mask, found, self.number(0))

    def weighted(self, places: Sequence[Op], weights: Sequence[Op]) -> Op:
        """`read` times the product of `weights` (N, *outputs)."""
        values, weight = self.read(places), weights[0]
        for part in weights[1:]:
            weight = self.b.mul(weight, part)
        return self.b.mul(values, self.b.broadcast_in_dim(weight, values.shape, (0, *range(2, values.shape.rank))))

    def sum_over(self, taps: Sequence[Sequence[tuple[Op, Op]]]) -> Op:
        """The weighted sum over all choices of a (place, weight) an axis."""
        total: Op | None = None
        for chosen in itertools.product(*taps):
            part = self.weighted([place for place, _ in chosen], [weight for _, weight in chosen])
            total = part if total is None else self.b.add(total, part)
        assert total is not None
        return total

    def linear(self, at: Op) -> list[tuple[Op, Op]]:
        first = self.b.floor(at)
        share = self.b.sub(at, first)
        return [(first, self.b.sub(self.number(1), share)), (self.b.add(first, self.number(1)), share)]

    def cubic(self, at: Op, size: int) -> list[tuple[Op, Op]]:
        """Four places, each brought in by itself, and the weights of Keys (1981) with a = -0.75."""
        b, number, a = self.b, self.number, -0.75
        first = b.floor(at)
        share = b.sub(at, first)
        taps = []
        for offset in range(-1, 3):
            distance = b.abs(b.sub(number(offset), share))
            if offset in (0, 1):
                # ((a + 2) d - (a + 3)) d^2 + 1
                inner = b.sub(b.mul(distance, number(a + 2)), number(a + 3))
                weight = b.add(b.mul(inner, b.mul(distance, distance)), number(1))
            else:
                # ((a d - 5 a) d + 8 a) d - 4 a
                inner = b.sub(b.mul(distance, number(a)), number(5 * a))
                inner = b.add(b.mul(inner, distance), number(8 * a))
                weight = b.sub(b.mul(inner, distance), number(4 * a))
            taps.append((self.bounded(b.add(first, number(offset)), size), weight))
        return taps


@lowering(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def grid_sampler(ctx: Context, x: Op, grid: Op, interpolation_mode: int, padding_mode: int, align_corners: bool) -> Op:
    """x (N, C, *sizes) at grid (N, *outputs, len(sizes)), the last size first, in [-1, 1]."""
    b, dtype = ctx.builder, x.shape.dtype
    sampler = _Sampler(ctx, ctx.wide(x), padding_mode, align_corners)
    grid = ctx.wide(grid)
    spatial = len(sampler.sizes)
    outputs = grid.shape.dimensions[:-1]
    coordinates = []
    for axis, size in enumerate(sampler.sizes):
        number = spatial - 1 - axis
        starts, limits = [0] * len(outputs), list(outputs)
        column = b.slice(grid, [*starts, number], [*limits, number + 1])
        coordinates.append(sampler.unnormalized(ctx.reshape(column, outputs), size))
    if interpolation_mode == _BICUBIC:
        taps = [sampler.cubic(at, size) for at, size in zip(coordinates, sampler.sizes, strict=True)]
        return ctx.cast(sampler.sum_over(taps), dtype)
    coordinates = [sampler.bounded(at, size) for at, size in zip(coordinates, sampler.sizes, strict=True)]
    if interpolation_mode == _NEAREST:
        return ctx.cast(sampler.read([b.round(at) for at in coordinates]), dtype)
    return ctx.cast(sampler.sum_over([sampler.linear(at) for at in coordinates]), dtype)
