"""Normalization by a batch's own moments, and the gradients of normalizations. All is computed in the wide type."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from easytorch.backends.dtypes import DType, dtype_of
from easytorch.backends.graph import Op
from easytorch.frontend.aten.norm import batch_normalize, by_channel
from easytorch.frontend.aten.reductions import moments
from easytorch.frontend.context import Context
from easytorch.frontend.registry import lowering

aten = torch.ops.aten


def _saved_dtype(ctx: Context, x: Op) -> DType:
    """That of the moments which are kept for the backward pass: the second output."""
    value = ctx.node.meta["val"][1] if ctx.node is not None else None
    return dtype_of(value.dtype) if isinstance(value, torch.Tensor) else ctx.wide(x).shape.dtype


def _channel_axes(x: Op) -> tuple[int, ...]:
    return (0, *range(2, x.shape.rank))


# --- over a batch


def _trained(
    ctx: Context, x: Op, weight: Op | None, bias: Op | None, eps: float
) -> tuple[Op, tuple[Op, Op], tuple[Op, Op]]:
    """The result; mean and reciprocal deviation to keep; mean and variance."""
    b, wide = ctx.builder, ctx.wide(x)
    channels = (x.shape.dimensions[1],)
    mean, variance = (ctx.reshape(part, channels) for part in moments(ctx, wide, _channel_axes(x)))
    reciprocal = b.rsqrt(b.add(variance, ctx.scalar(eps, wide.shape.dtype)))
    kind = _saved_dtype(ctx, x)
    result = batch_normalize(ctx, x, mean, variance, weight, bias, eps)
    return result, (ctx.cast(mean, kind), ctx.cast(reciprocal, kind)), (mean, variance)


def _moved_along(ctx: Context, running: Op, new: Op, momentum: float) -> Op:
    b, kind = ctx.builder, new.shape.dtype
    kept = b.mul(ctx.cast(running, kind), ctx.scalar(1 - momentum, kind))
    return ctx.cast(b.add(kept, b.mul(new, ctx.scalar(momentum, kind))), running.shape.dtype)


@lowering(aten._native_batch_norm_legit.no_stats)
def native_batch_norm_no_stats(
    ctx: Context, x: Op, weight: Op | None, bias: Op | None, training: bool, momentum: float, eps: float
) -> tuple[Op, Op, Op]:
    result, saved, _ = _trained(ctx, x, weight, bias, eps)
    return result, *saved


@lowering(aten._native_batch_norm_legit_functional.default)
def native_batch_norm_functional(
    ctx: Context,
    x: Op,
    weight: Op | None,
    bias: Op | None,
    running_mean: Op,
    running_var: Op,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Op, ...]:
    """The result, what is kept for the backward pass, and the running moments as they are afterwards."""
    if not training:
        empty = ctx.full((0,), 0, _saved_dtype(ctx, x))
        result = batch_normalize(ctx, x, running_mean, running_var, weight, bias, eps)
        return result, empty, empty, running_mean, running_var
    result, saved, (mean, variance) = _trained(ctx, x, weight, bias, eps)
    count = x.shape.size // x.shape.dimensions[1]
    # The running variance is the unbiased one.
    unbiased = ctx.builder.mul(variance, ctx.scalar(count / max(count - 1, 1), variance.shape.dtype))
    return (
        result,
        *saved,
        _moved_along(ctx, running_mean, mean, momentum),
        _moved_along(ctx, running_var, unbiased, momentum),
    )


@lowering(aten._native_batch_norm_legit.default)
def native_batch_norm(
    ctx: Context,
    x: Op,
    weight: Op | None,
    bias: Op | None,
    running_mean: Op,
    running_var: Op,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Op, ...]:
    """In a functional graph the running moments are not read again."""
    arguments = (x, weight, bias, running_mean, running_var, training, momentum, eps)
    return native_batch_norm_functional(ctx, *arguments)[:3]


@lowering(aten._batch_norm_with_update_functional.default)
def batch_norm_with_update_functional(
    ctx: Context,
    x: Op,
    weight: Op | None,
    bias: Op | None,
    running_mean: Op,
    running_var: Op,
    momentum: float,
    eps: float,
) -> tuple[Op, ...]:
    arguments = (x, weight, bias, running_mean, running_var, True, momentum, eps)
    result, mean, reciprocal, new_mean, new_var = native_batch_norm_functional(ctx, *arguments)
    return result, mean, reciprocal, ctx.full((0,), 0, DType.UINT8), new_mean, new_var


@lowering(aten._batch_norm_no_update.default)
def batch_norm_no_update(
    ctx: Context,
    x: Op,
    weight: Op | None,
    bias: Op | None,
    running_mean: Op | None,
    running_var: Op | None,
    momentum: float,
    eps: float,
) -> tuple[Op, ...]:
    reserve = ctx.full((0,), 0, DType.UINT8)
    if running_mean is None or running_var is None:
        result, saved, _ = _trained(ctx, x, weight, bias, eps)
        return result, *saved, reserve
    empty = ctx.full((0,), 0, _saved_dtype(ctx, x))
    return batch_normalize(ctx, x, running_mean, running_var, weight, bias, eps), empty, empty, reserve


@lowering(aten.native_batch_norm_backward.default)
def native_batch_norm_backward(
    ctx: Context,
    grad_out: Op,
    x: Op,
    weight: Op | None,
    running_mean: Op | None,
    running_var: Op | None,
    save_mean: Op | None,
    save_invstd: Op | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[Op | None, ...]:
    b, wide, grad = ctx.builder, ctx.wide(x), ctx.wide(grad_out)
    kind, axes = wide.shape.dtype, _channel_axes(x)
    if train:
        assert save_mean is not None and save_invstd is not None
        mean, reciprocal = by_channel(ctx, save_mean, wide), by_channel(ctx, save_invstd, wide)
    else:
        assert running_mean is not None and running_var is not None
        mean = by_channel(ctx, running_mean, wide)
        reciprocal = b.rsqrt(b.add(by_channel(ctx, running_var, wide), ctx.scalar(eps, kind)))
    normed = b.mul(b.sub(wide, mean), reciprocal)
    to_bias = ctx.reduce(b.reduce_sum, grad, axes, True)
    to_weight = ctx.reduce(b.reduce_sum, b.mul(grad, normed), axes, True)
    scale = reciprocal if weight is None else b.mul(reciprocal, by_channel(ctx, weight, wide))
    to_x = grad
    if train:
        count = ctx.scalar(x.shape.size // x.shape.dimensions[1], kind)
        to_x = b.sub(b.sub(grad, b.div(to_bias, count)), b.mul(normed, b.div(to_weight, count)))
    vector = (x.shape.dimensions[1],)
    parameter = kind if weight is None else weight.shape.dtype
    return (
        ctx.cast(b.mul(to_x, scale), x.shape.dtype) if output_mask[0] else None,
        ctx.cast(ctx.reshape(to_weight, vector), parameter) if output_mask[1] else None,
        ctx.cast(ctx.reshape(to_bias, vector), parameter) if output_mask[2] else None,
    )


@lowering(aten.batch_norm_backward.default)
def batch_norm_backward(
    ctx: Context,
    grad_out: Op,
    x: Op,
    weight: Op | None,
    running_mean: Op | None,
    running_var: Op | None,
    save_mean: Op | None,
    save_var: Op | None,
    update: bool,
    eps: float,
    output_mask: Sequence[bool],
    reserve: Op,
) -> tuple[Op | None, ...]:
    arguments = (grad_out, x, weight, running_mean, running_var, save_mean, save_var, update, eps, output_mask)
    return native_batch_norm_backward(ctx, *arguments)


# --- over groups of channels


@lowering(aten.native_group_norm.default)
def native_group_norm(
    ctx: Context, x: Op, weight: Op | None, bias: Op | None, N: int, C: int, HxW: int, group: int, eps: float
) -> tuple[Op, Op, Op]:
    """x (N, C, *): the result, and mean and reciprocal deviation (N, group)."""
    b = ctx.builder
    wide = ctx.wide(ctx.reshape(x, (N, group, C // group * HxW)))
    kind = wide.shape.dtype
    mean, variance = moments(ctx, wide, (2,))
    reciprocal = b.rsqrt(b.add(variance, ctx.scalar(eps, kind)))
    result = ctx.reshape(b.mul(b.sub(wide, mean), reciprocal), (N, C, HxW))
    if weight is not None:
        result = b.mul(result, by_channel(ctx, weight, result))
    if bias is not None:
        result = b.add(result, by_channel(ctx, bias, result))
    saved = _saved_dtype(ctx, x)
    return (
        ctx.cast(ctx.reshape(result, x.shape.dimensions), x.shape.dtype),
        ctx.cast(ctx.reshape(mean, (N, group)), saved),
        ctx.cast(ctx.reshape(reciprocal, (N, group)), saved),
    )


@lowering(aten.native_group_norm_backward.default)
def native_group_norm_backward(
    ctx: Context,
    grad_out: Op,
    x: Op,
    mean: Op,
    rstd: Op,
    weight: Op | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: Sequence[bool],
) -> tuple[Op | None, ...]:
    b = ctx.builder
    grouped = (N, group, C // group * HxW)
    wide, grad = (ctx.wide(ctx.reshape(part, (N, C, HxW))) for part in (x, grad_out))
    kind = wide.shape.dtype
    average, reciprocal = (ctx.reshape(ctx.cast(part, kind), (N, group, 1)) for part in (mean, rstd))
    normed = b.mul(b.sub(ctx.reshape(wide, grouped), average), reciprocal)
    scaled = grad if weight is None else b.mul(grad, by_channel(ctx, weight, grad))
    to_x = _through(ctx, ctx.reshape(scaled, grouped), normed, reciprocal, (2,))
    parameter = x.shape.dtype if weight is None else weight.shape.dtype
    products = b.mul(grad, ctx.reshape(normed, (N, C, HxW)))
    return (
        ctx.cast(ctx.reshape(to_x, x.shape.dimensions), x.shape.dtype) if output_mask[0] else None,
        ctx.cast(b.reduce_sum(products, 0, 2), parameter) if output_mask[1] else None,
        ctx.cast(b.reduce_sum(grad, 0, 2), parameter) if output_mask[2] else None,
    )


def _through(ctx: Context, grad: Op, normed: Op, reciprocal: Op, axes: Sequence[int]) -> Op:
    """The gradient to what was normalized over `axes`, of that to the result."""
    b = ctx.builder
    count = ctx.scalar(math.prod(grad.shape.dimensions[axis] for axis in axes), grad.shape.dtype)
    mean = b.div(ctx.reduce(b.reduce_sum, grad, axes, True), count)
    slope = b.div(ctx.reduce(b.reduce_sum, b.mul(grad, normed), axes, True), count)
    return b.mul(b.sub(b.sub(grad, mean), b.mul(normed, slope)), reciprocal)


# --- over the last axes


@lowering(aten.native_layer_norm_backward.default)
def native_layer_norm_backward(
    ctx: Context,
    grad_out: Op,
    x: Op,
    normalized_shape: Sequence[int],
    mean: Op,
    rstd: Op,
    weight: Op | None,
    bias: Op | None,
    output_mask: Sequence[bool],
) -> tuple[Op | None, ...]:
    b, wide, grad = ctx.builder, ctx.wide(x), ctx.wide(grad_out)
    kind, first = wide.shape.dtype, x.shape.rank - len(tuple(normalized_shape))
    inner, outer = tuple(range(first, x.shape.rank)), tuple(range(first))
    average, reciprocal = ctx.cast(mean, kind), ctx.cast(rstd, kind)
    normed = b.mul(b.sub(wide, average), reciprocal)
    scaled = grad if weight is None else b.mul(*ctx.operands(grad, weight, dtype=kind))
    to_x = _through(ctx, scaled, normed, reciprocal, inner)
    products = b.mul(grad, normed)
    sums = [b.reduce_sum(part, outer) if outer else part for part in (products, grad)]
    kinds = [part.shape.dtype if part is not None else x.shape.dtype for part in (weight, bias)]
    return (
        ctx.cast(to_x, x.shape.dtype) if output_mask[0] else None,
        ctx.cast(sums[0], kinds[0]) if output_mask[1] else None,
        ctx.cast(sums[1], kinds[1]) if output_mask[2] else None,
    )
