"""The attention that autograd uses on a CPU, which returns the logsumexp, and its gradients.

Dao et al. 2022 (FlashAttention), section 3.1 and appendix B.4; blocking is left to XLA.
"""

from __future__ import annotations

import math
from operator import getitem

import torch

from easytorch.backends.dtypes import DType
from easytorch.backends.graph import Op
from easytorch.backends.shapes import Shape
from easytorch.frontend.context import Context
from easytorch.frontend.errors import LoweringError
from easytorch.frontend.registry import lowering

aten = torch.ops.aten


@lowering(aten._scaled_dot_product_flash_attention_for_cpu.default)
def flash_attention(
    ctx: Context,
    query: Op,
    key: Op,
    value: Op,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Op | None = None,
    scale: float | None = None,
) -> tuple[Op, Op | None]:
    """(B, H, T, D), (B, K, S, D), (B, K, S, Dv) -> (B, H, T, Dv), and log(sum(exp(scores))) (B, H, T) if it is used.

    H is a multiple of K.
    """
    _refuse_dropout(dropout_p)
    mask = None
    if attn_mask is not None:
        mask = attn_mask if attn_mask.shape.dtype is DType.BOOL else ctx.cast(attn_mask, query.shape.dtype)
    output = ctx.builder.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, scale=scale)
    if ctx.node is not None and all(user.target is not getitem or user.args[1] == 0 for user in ctx.node.users):
        return output, None
    b = ctx.builder
    scores = _scores(ctx, query, key, attn_mask, is_causal, scale)
    lowest = ctx.scalar(-math.inf, scores.shape.dtype)
    greatest = b.reduce_max(scores, 3)
    shift = b.where(b.equal(greatest, lowest), ctx.scalar(0.0, scores.shape.dtype), greatest)
    powers = b.exp(b.sub(scores, ctx.keep(shift, scores, (3,))))
    return output, b.add(b.log(b.reduce_sum(powers, 3)), shift)


@lowering(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def flash_attention_backward(
    ctx: Context,
    grad_out: Op,
    query: Op,
    key: Op,
    value: Op,
    out: Op,
    logsumexp: Op,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Op | None = None,
    scale: float | None = None,
) -> tuple[Op, Op, Op]:
    """The gradients of query, key and value; zero for a row with nothing to attend to."""
    _refuse_dropout(dropout_p)
    b = ctx.builder
    scores = _scores(ctx, query, key, attn_mask, is_causal, scale)
    kind = scores.shape.dtype
    sums = ctx.keep(ctx.cast(logsumexp, kind), scores, (3,))
    empty = b.equal(sums, ctx.scalar(-math.inf, kind))
    weights = b.exp(b.sub(scores, b.where(empty, ctx.scalar(math.inf, kind), sums)))
    grad, wide_out = ctx.wide(grad_out), ctx.wide(out)
    grad_weights = b.dot_general(grad, (3,), (0, 1), _for_heads(ctx, ctx.wide(value), query), (3,), (0, 1))
    delta = b.reduce_sum(b.mul(grad, wide_out), 3)
    grad_scores = b.mul(weights, b.sub(grad_weights, ctx.keep(delta, scores, (3,))))
    grad_scores = b.mul(grad_scores, ctx.scalar(_scale(query, scale), kind))
    grad_query = b.dot_general(grad_scores, (3,), (0, 1), _for_heads(ctx, ctx.wide(key), query), (2,), (0, 1))
    grad_key = b.dot_general(grad_scores, (2,), (0, 1), ctx.wide(query), (2,), (0, 1))
    grad_value = b.dot_general(weights, (2,), (0, 1), grad, (2,), (0, 1))
    return (
        ctx.cast(grad_query, query.shape.dtype),
        ctx.cast(_over_groups(ctx, grad_key, key), key.shape.dtype),
        ctx.cast(_over_groups(ctx, grad_value, value), value.shape.dtype),
    )


def _scores(ctx: Context, query: Op, key: Op, mask: Op | None, is_causal: bool, scale: float | None) -> Op:
    """(B, H, T, S): query key^T * scale, -inf where nothing is attended."""
    b = ctx.builder
    scores = b.dot_general(ctx.wide(query), (3,), (0, 1), _for_heads(ctx, ctx.wide(key), query), (3,), (0, 1))
    kind, dimensions = scores.shape.dtype, scores.shape.dimensions
    scores = b.mul(scores, ctx.scalar(_scale(query, scale), kind))
    lowest = ctx.scalar(-math.inf, kind)
    if is_causal:
        square = Shape(DType.INT32, dimensions[2:])
        allowed = b.greater_or_equal(b.iota(square, 0), b.iota(square, 1))
        scores = b.where(ctx.expand(allowed, dimensions), scores, lowest)
    if mask is None:
        return scores
    if mask.shape.dtype is DType.BOOL:
        return b.where(ctx.expand(mask, dimensions), scores, lowest)
    return b.add(scores, ctx.expand(ctx.cast(mask, kind), dimensions))


def _for_heads(ctx: Context, x: Op, query: Op) -> Op:
    """(B, K, S, D) -> (B, H, S, D): each head of x for H / K heads of query."""
    batch, heads, *rest = x.shape.dimensions
    groups = query.shape.dimensions[1] // heads
    if groups == 1:
        return x
    repeated = ctx.expand(ctx.reshape(x, (batch, heads, 1, *rest)), (batch, heads, groups, *rest))
    return ctx.reshape(repeated, (batch, heads * groups, *rest))


def _over_groups(ctx: Context, grad: Op, x: Op) -> Op:
    """The reverse for gradients: (B, H, S, D) -> (B, K, S, D), sums over the heads that share one of x."""
    batch, heads, *rest = x.shape.dimensions
    groups = grad.shape.dimensions[1] // heads
    if groups == 1:
        return grad
    return ctx.builder.reduce_sum(ctx.reshape(grad, (batch, heads, groups, *rest)), 2)


def _scale(query: Op, scale: float | None) -> float:
    return query.shape.dimensions[3] ** -0.5 if scale is None else scale


def _refuse_dropout(dropout_p: float) -> None:
    if dropout_p:
        raise LoweringError("this attention has no dropout; torch itself takes the one of products and softmax for it")
