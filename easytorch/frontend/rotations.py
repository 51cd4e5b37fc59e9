"""Jacobi's rotations: every column of a matrix turned with a partner until all are as they should be.

Brent and Luk (1985): in a round all columns are paired, and the rounds of a sweep pair every two of them once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from easytorch.backends.builder import Builder
from easytorch.backends.dtypes import DType
from easytorch.backends.graph import Op
from easytorch.frontend.arrays import take
from easytorch.frontend.context import Context
from easytorch.frontend.matrices import part_at

# Convergence is quadratic: six to ten sweeps in float64.
SWEEPS = 40
# (context, partners, state) -> the next state, and how far from done it was: a scalar, of float.
Round = Callable[[Context, Op, Sequence[Op]], tuple[Sequence[Op], Op]]


def tournament(count: int) -> np.ndarray:
    """(rounds, count) int32: the partner of each in each round; of an odd count one is its own."""
    players = count + count % 2
    table = np.empty((players - 1, players), np.int32)
    for round_ in range(players - 1):
        circle = (np.arange(players - 1) + round_) % (players - 1)
        ranks = [players - 1, *circle]
        for one, other in zip(ranks[: players // 2], reversed(ranks[players // 2 :]), strict=True):
            table[round_, one], table[round_, other] = other, one
    if count == players:
        return table
    # Whoever meets the player that is not there rests.
    table = table[:, :count]
    return np.where(table == count, np.arange(count, dtype=np.int32), table)


def rotated_until(ctx: Context, round_: Round, tolerance: float, count: int, *state: Op) -> list[Op]:
    """The state after as many sweeps of `round_` over `count` columns as it takes for one that stays within
    `tolerance`."""
    if count < 2 or not state[0].shape.size:
        return list(state)
    table = tournament(count)
    kind = state[0].shape.dtype.real
    one, zero, length = (ctx.scalar(number, DType.INT32) for number in (1, 0, len(table)))
    last, limit = (ctx.scalar(number, DType.INT32) for number in (len(table) - 1, SWEEPS * len(table)))
    partners, bound = ctx.constant(table), ctx.scalar(tolerance, kind)

    def unfinished(inner: Builder, step: Op, going: Op, worst: Op, *rest: Op) -> Op:
        return inner.logical_and(going, inner.less_than(step, limit))

    def body(inner: Builder, step: Op, going: Op, worst: Op, *rest: Op) -> tuple[Op, ...]:
        context = ctx.within(inner)
        number = inner.rem(step, length)
        pairs = context.reshape(part_at(context, partners, (number, None), (1, count)), (count,))
        turned, off = round_(context, pairs, rest)
        worst = inner.where(inner.equal(number, zero), off, inner.max(worst, off))
        # Of a matrix with NaN the comparison is false, and the loop ends.
        going = inner.logical_or(inner.less_than(number, last), inner.greater_than(worst, bound))
        return (inner.add(step, one), going, worst, *turned)

    start = (zero, ctx.scalar(True, DType.BOOL), ctx.scalar(0, kind))
    return list(ctx.builder.while_loop(unfinished, body, *start, *state)[3:])


def rotation(ctx: Context, partners: Op, own: Op, other: Op, product: Op) -> tuple[Op, Op]:
    """The cosine and the (complex) factor of the partner with which each column is turned: `c * x + k * partner`.

    It makes the 2 x 2 Hermitian matrices of diagonal `own`, `other` and element `product` = <partner, column>, all
    (batch, n), diagonal by the smaller of both angles (Rutishauser, 1966).
    """
    b, dimensions, kind = ctx.builder, own.shape.dimensions, own.shape.dtype
    zero, one = ctx.scalar(0, kind), ctx.scalar(1, kind)
    places = ctx.iota(dimensions, 1, DType.INT32)
    pairs = b.broadcast_in_dim(partners, type(places.shape)(DType.INT32, dimensions), (1,))
    first = b.less_than(places, pairs)
    size = b.abs(product)
    still = b.logical_or(b.equal(places, pairs), b.equal(size, zero))
    divisor = b.where(still, ctx.expand(one, dimensions), size)
    difference = b.where(first, b.sub(other, own), b.sub(own, other))
    theta = b.div(b.mul(difference, ctx.scalar(0.5, kind)), divisor)
    steep = b.add(b.abs(theta), b.sqrt(b.add(b.mul(theta, theta), one)))
    tangent = b.div(b.where(b.less_than(theta, zero), ctx.scalar(-1, kind), ctx.expand(one, dimensions)), steep)
    cosine = b.rsqrt(b.add(b.mul(tangent, tangent), one))
    sine = b.where(first, b.neg(b.mul(tangent, cosine)), b.mul(tangent, cosine))
    cosine = b.where(still, ctx.expand(one, dimensions), cosine)
    sine = b.where(still, zero, sine)
    wide = product.shape.dtype
    return ctx.cast(cosine, wide), b.mul(ctx.cast(sine, wide), b.div(product, ctx.cast(divisor, wide)))


def turned_columns(ctx: Context, x: Op, partners: Op, cosine: Op, factor: Op) -> Op:
    """(batch, m, n), each column turned with its partner."""
    b, (batch, _, width) = ctx.builder, x.shape.dimensions
    cosine, factor = (ctx.reshape(part, (batch, 1, width)) for part in (cosine, factor))
    return b.add(b.mul(x, cosine), b.mul(take(ctx, x, 2, partners), factor))
