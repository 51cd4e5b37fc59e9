"""Softmax and normalizations. Narrow floats are normalized in float32 and rounded once, as in ATen's kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from easytorch.backends.graph import Op
from easytorch.frontend.aten.reductions import moments
from easytorch.frontend.context import Context
from easytorch.frontend.registry import lowering

aten = torch.ops.aten


@lowering(aten.softmax.int)
def softmax(ctx: Context, x: Op, dim: int, dtype: torch.dtype | None = None) -> Op:
    x = x if dtype is None else ctx.cast(x, dtype)
    if not x.shape.rank:
        return ctx.scalar(1, x.shape.dtype)
    return ctx.builder.softmax(x, ctx.axis(dim, x.shape.rank))


@lowering(aten._softmax.default)
def softmax_internal(ctx: Context, x: Op, dim: int, half_to_float: bool) -> Op:
    return softmax(ctx, ctx.wide(x) if half_to_float else x, dim)


@lowering(aten._safe_softmax.default)
def safe_softmax(ctx: Context, x: Op, dim: int, dtype: torch.dtype | None = None) -> Op:
    """Zeros where all of a row is -inf."""
    b = ctx.builder
    x = x if dtype is None else ctx.cast(x, dtype)
    if not x.shape.size:
        return x
    hidden = b.equal(x, ctx.scalar(-math.inf, x.shape.dtype))
    empty = ctx.reduce(b.reduce_logical_and, hidden, dim, True)
    return b.where(
        ctx.expand(empty, x.shape.dimensions), ctx.full(x.shape.dimensions, 0, x.shape.dtype), softmax(ctx, x, dim)
    )


@lowering(aten.log_softmax.int)
def log_softmax(ctx: Context, x: Op, dim: int, dtype: torch.dtype | None = None) -> Op:
    b = ctx.builder
    x = x if dtype is None else ctx.cast(x, dtype)
    if not x.shape.rank:
        return ctx.scalar(0, x.shape.dtype)
    wide = ctx.wide(x)
    shifted = b.sub(wide, ctx.reduce(b.reduce_max, wide, dim, True))
    return ctx.cast(b.sub(shifted, b.log(ctx.reduce(b.reduce_sum, b.exp(shifted), dim, True))), x.shape.dtype)


@lowering(aten._log_softmax.default)
def log_softmax_internal(ctx: Context, x: Op, dim: int, half_to_float: bool) -> Op:
    return log_softmax(ctx, ctx.wide(x) if half_to_float else x, dim)


@lowering(aten.layer_norm.default)
def layer_norm(
    ctx: Context,
    x: Op,
    normalized_shape: Sequence[int],
    weight: Op | None = None,
    bias: Op | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Op:
    kind, shape = x.shape.dtype, tuple(normalized_shape)
    axes = range(x.shape.rank - len(shape), x.shape.rank)
    scale = ctx.full(shape, 1, kind) if weight is None else ctx.cast(weight, kind)
    offset = ctx.full(shape, 0, kind) if bias is None else ctx.cast(bias, kind)
    return ctx.builder.layer_norm(x, scale, offset, tuple(axes), eps)


@lowering(aten.native_layer_norm.default)
def native_layer_norm(
    ctx: Context, x: Op, normalized_shape: Sequence[int], weight: Op | None, bias: Op | None, eps: float
) -> tuple[Op, Op, Op]:
    """The result, and mean and reciprocal deviation of the wide type."""
    b, wide = ctx.builder, ctx.wide(x)
    axes = tuple(range(x.shape.rank - len(tuple(normalized_shape)), x.shape.rank))
    mean, variance = moments(ctx, wide, axes)
    reciprocal = b.rsqrt(b.add(variance, ctx.scalar(eps, wide.shape.dtype)))
    return layer_norm(ctx, x, normalized_shape, weight, bias, eps), mean, reciprocal


@lowering(aten.rms_norm.default)
def rms_norm(
    ctx: Context, x: Op, normalized_shape: Sequence[int], weight: Op | None = None, eps: float | None = None
) -> Op:
    b, wide = ctx.builder, ctx.wide(x)
    axes = tuple(range(x.shape.rank - len(tuple(normalized_shape)), x.shape.rank))
    # ATen's default is the epsilon of the type it computes in.
    epsilon = torch.finfo(getattr(torch, wide.shape.dtype.value)).eps if eps is None else eps
    count = ctx.scalar(torch.Size(normalized_shape).numel(), wide.shape.dtype)
    square = b.div(ctx.reduce(b.reduce_sum, b.mul(wide, wide), axes, True), count)
    result = b.mul(wide, b.rsqrt(b.add(square, ctx.scalar(epsilon, wide.shape.dtype))))
    if weight is not None:
        result = b.mul(*ctx.operands(result, weight, dtype=wide.shape.dtype))
    return ctx.cast(result, x.shape.dtype)


def by_channel(ctx: Context, vector: Op, like: Op) -> Op:
    """A vector of channels against `like` (N, C, ...): axes of size one around it."""
    wide = ctx.cast(vector, like.shape.dtype)
    return ctx.reshape(wide, (1, -1, *(1,) * (like.shape.rank - 2)))


def batch_normalize(ctx: Context, x: Op, mean: Op, variance: Op, weight: Op | None, bias: Op | None, eps: float) -> Op:
    """(x - mean) / sqrt(variance + eps) * weight + bias; vectors of channels are folded into one scale and shift."""
    b, wide = ctx.builder, ctx.wide(x)
    kind = wide.shape.dtype
    scale = b.rsqrt(b.add(ctx.cast(variance, kind), ctx.scalar(eps, kind)))
    if weight is not None:
        scale = b.mul(scale, ctx.cast(weight, kind))
    centered = b.sub(wide, by_channel(ctx, mean, wide))
    result = b.mul(centered, by_channel(ctx, scale, wide))
    if bias is not None:
        result = b.add(result, by_channel(ctx, bias, wide))
    return ctx.cast(result, x.shape.dtype)


@lowering(aten._native_batch_norm_legit_no_training.default)
def native_batch_norm_no_training(
    ctx: Context,
    x: Op,
    weight: Op | None,
    bias: Op | None,
    running_mean: Op,
    running_var: Op,
    momentum: float,
    eps: float,
) -> tuple[Op, Op, Op]:
    """The result; the tensors that training would save are empty."""
    empty = ctx.full((0,), 0, ctx.wide(x).shape.dtype)
    return batch_normalize(ctx, x, running_mean, running_var, weight, bias, eps), empty, empty
