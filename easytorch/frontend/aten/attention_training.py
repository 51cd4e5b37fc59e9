"""The attention that autograd uses on a CPU, which returns the logsumexp, and its gradients.

Dao et al. 2022 (FlashAttention), section 3.1 and appendix B.4. Long sequences are computed in blocks of queries, of
which causal ones see only the keys before them: the scores of one block are there at a time, not of all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import getitem

import torch

from easytorch.backends.dtypes import DType
from easytorch.backends.graph import Op
from easytorch.backends.shapes import Shape
from easytorch.frontend.context import Context
from easytorch.frontend.errors import LoweringError
from easytorch.frontend.registry import lowering

aten = torch.ops.aten
# Queries of a block, and the length from which there are blocks.
_BLOCK, _LONG = 1024, 2048


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
    if len(blocks := _blocks(query, key, is_causal)) > 1:
        parts = [_block(ctx, query, key, value, attn_mask, is_causal, scale, block) for block in blocks]
        return tuple(ctx.builder.concatenate(2, *one) for one in zip(*parts, strict=True))  # type: ignore[return-value]
    output = ctx.builder.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, scale=scale)
    if ctx.node is not None and all(user.target is not getitem or user.args[1] == 0 for user in ctx.node.users):
        return output, None
    scores = _scores(ctx, query, key, attn_mask, is_causal, scale)
    return output, _softmax(ctx, scores)[1]


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
    blocks = _blocks(query, key, is_causal)
    if len(blocks) == 1:
        return _gradients(ctx, grad_out, query, key, value, out, logsumexp, attn_mask, is_causal, scale)
    of_query: list[Op] = []
    of_key = of_value = None
    for block in blocks:
        rows = [_rows(ctx, one, block.start, block.stop) for one in (grad_out, query, out, logsumexp)]
        near = [_rows(ctx, one, 0, block.keys) for one in (key, value)]
        grad, near_query, near_out, sums = rows
        mask = _part_of_mask(ctx, attn_mask, block)
        found = _gradients(ctx, grad, near_query, near[0], near[1], near_out, sums, mask, is_causal, scale, block.start)
        of_query.append(found[0])
        of_key = _add(ctx, of_key, found[1], key)
        of_value = _add(ctx, of_value, found[2], value)
    assert of_key is not None and of_value is not None
    return (
        ctx.builder.concatenate(2, *of_query),
        ctx.cast(of_key, key.shape.dtype),
        ctx.cast(of_value, value.shape.dtype),
    )


@dataclass(frozen=True)
class QueryBlock:
    """Queries from `start` to `stop`, which see the first `keys` keys."""

    start: int
    stop: int
    keys: int


def _blocks(query: Op, key: Op, is_causal: bool) -> list[QueryBlock]:
    length, keys = query.shape.dimensions[2], key.shape.dimensions[2]
    step = _BLOCK if length >= _LONG else length
    starts = range(0, length, max(step, 1))
    stops = [min(start + step, length) for start in starts]
    return [
        QueryBlock(start, stop, min(stop, keys) if is_causal else keys)
        for start, stop in zip(starts, stops, strict=True)
    ]


def _block(
    ctx: Context,
    query: Op,
    key: Op,
    value: Op,
    mask: Op | None,
    is_causal: bool,
    scale: float | None,
    block: QueryBlock,
) -> tuple[Op, Op]:
    """The output and the logsumexp of a block of queries."""
    b = ctx.builder
    near_query = _rows(ctx, query, block.start, block.stop)
    near_key, near_value = (_rows(ctx, one, 0, block.keys) for one in (key, value))
    scores = _scores(ctx, near_query, near_key, _part_of_mask(ctx, mask, block), is_causal, scale, block.start)
    weights, sums = _softmax(ctx, scores)
    values = _for_heads(ctx, near_value, query)
    weights = ctx.cast(weights, values.shape.dtype)
    return ctx.cast(b.dot_general(weights, (3,), (0, 1), values, (2,), (0, 1)), query.shape.dtype), sums


def _softmax(ctx: Context, scores: Op) -> tuple[Op, Op]:
    """Weights, zero in a row without a score, and log(sum(exp(scores)))."""
    b, kind = ctx.builder, scores.shape.dtype
    lowest, zero = ctx.scalar(-math.inf, kind), ctx.scalar(0.0, kind)
    greatest = b.reduce_max(scores, 3)
    shift = b.where(b.equal(greatest, lowest), zero, greatest)
    powers = b.exp(b.sub(scores, ctx.keep(shift, scores, (3,))))
    total = b.reduce_sum(powers, 3)
    divisor = b.where(b.equal(total, zero), ctx.scalar(1.0, kind), total)
    return b.div(powers, ctx.keep(divisor, scores, (3,))), b.add(b.log(total), shift)


def _rows(ctx: Context, x: Op, start: int, stop: int) -> Op:
    """x from `start` to `stop` along its third axis."""
    sizes = x.shape.dimensions
    if (start, stop) == (0, sizes[2]):
        return x
    starts = [start if axis == 2 else 0 for axis in range(len(sizes))]
    return ctx.builder.slice(x, starts, [stop if axis == 2 else size for axis, size in enumerate(sizes)])


def _part_of_mask(ctx: Context, mask: Op | None, block: QueryBlock) -> Op | None:
    if mask is None:
        return None
    sizes = mask.shape.dimensions
    rows, columns = sizes[-2], sizes[-1]
    starts, stops = [0] * len(sizes), list(sizes)
    if rows > 1:
        starts[-2], stops[-2] = block.start, block.stop
    if columns > 1:
        stops[-1] = block.keys
    return ctx.builder.slice(mask, starts, stops)


def _add(ctx: Context, total: Op | None, part: Op, like: Op) -> Op:
    """`total` and the gradient of the first keys, in float32 at least."""
    b, missing = ctx.builder, like.shape.dimensions[2] - part.shape.dimensions[2]
    wide = ctx.wide(part)
    if missing:
        rest = [missing if axis == 2 else size for axis, size in enumerate(like.shape.dimensions)]
        wide = b.concatenate(2, wide, ctx.full(rest, 0.0, wide.shape.dtype))
    return wide if total is None else b.add(total, wide)


def _gradients(
    ctx: Context,
    grad_out: Op,
    query: Op,
    key: Op,
    value: Op,
    out: Op,
    logsumexp: Op,
    attn_mask: Op | None,
    is_causal: bool,
    scale: float | None,
    first: int = 0,
) -> tuple[Op, Op, Op]:
    """Of queries from `first` on, whose keys are all that they see."""
    b = ctx.builder
    scores = _scores(ctx, query, key, attn_mask, is_causal, scale, first)
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


def _scores(
    ctx: Context, query: Op, key: Op, mask: Op | None, is_causal: bool, scale: float | None, first: int = 0
) -> Op:
    """(B, H, T, S): query key^T * scale, -inf where nothing is attended. first: the place of the first query."""
    b = ctx.builder
    scores = b.dot_general(ctx.wide(query), (3,), (0, 1), _for_heads(ctx, ctx.wide(key), query), (3,), (0, 1))
    kind, dimensions = scores.shape.dtype, scores.shape.dimensions
    scores = b.mul(scores, ctx.scalar(_scale(query, scale), kind))
    lowest = ctx.scalar(-math.inf, kind)
    if is_causal:
        square = Shape(DType.INT32, dimensions[2:])
        places = (
            b.add(b.iota(square, 0), ctx.full(square.dimensions, first, DType.INT32)) if first else b.iota(square, 0)
        )
        allowed = b.greater_or_equal(places, b.iota(square, 1))
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
