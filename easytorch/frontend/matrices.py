"""Stacks of matrices, as factorizations use them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from easytorch.backends.builder import Builder
from easytorch.backends.dtypes import DType
from easytorch.backends.graph import Op
from easytorch.frontend.context import Context

# (context, column, state) -> the next state
Step = Callable[[Context, Op, Sequence[Op]], Sequence[Op]]


def as_stack(ctx: Context, x: Op) -> Op:
    """(..., m, n) -> (batch, m, n)"""
    return ctx.reshape(x, (math.prod(x.shape.dimensions[:-2]), *x.shape.dimensions[-2:]))


def unstack(ctx: Context, x: Op, like: Op) -> Op:
    """(batch, ...) -> (..., ...) with the batch axes of `like`."""
    return ctx.reshape(x, (*like.shape.dimensions[:-2], *x.shape.dimensions[1:]))


def transposed(ctx: Context, x: Op) -> Op:
    order = list(range(x.shape.rank))
    return ctx.transpose(x, [*order[:-2], order[-1], order[-2]])


def adjoint_of(ctx: Context, x: Op) -> Op:
    turned = transposed(ctx, x)
    return ctx.builder.conj(turned) if x.shape.dtype.is_complex else turned


def product(ctx: Context, x: Op, other: Op) -> Op:
    """(batch, m, k), (batch, k, n) -> (batch, m, n)"""
    return ctx.builder.dot_general(x, (2,), (0,), other, (1,), (0,))


def index_along(ctx: Context, x: Op, axis: int) -> Op:
    return ctx.iota(x.shape.dimensions, axis, DType.INT32)


def triangle(ctx: Context, x: Op, lower: bool, diagonal: float | None = None) -> Op:
    """The triangle of (batch, m, n), zeros elsewhere; its diagonal all `diagonal` if given."""
    b, rows, columns = ctx.builder, index_along(ctx, x, 1), index_along(ctx, x, 2)
    inside = b.greater_or_equal(rows, columns) if lower else b.less_or_equal(rows, columns)
    kept = b.where(inside, x, ctx.scalar(0, x.shape.dtype))
    if diagonal is None:
        return kept
    return b.where(b.equal(rows, columns), ctx.scalar(diagonal, x.shape.dtype), kept)


def identity(ctx: Context, batch: int, size: int, dtype: DType) -> Op:
    rows, columns = (ctx.iota((batch, size, size), axis, DType.INT32) for axis in (1, 2))
    return ctx.cast(ctx.builder.equal(rows, columns), dtype)


def diagonal_of(ctx: Context, x: Op) -> Op:
    """(batch, m, n) -> (batch, min(m, n))"""
    size = min(x.shape.dimensions[1:])
    square = ctx.builder.slice(x, (0, 0, 0), (x.shape.dimensions[0], size, size))
    eye = identity(ctx, square.shape.dimensions[0], size, DType.BOOL)
    kept = ctx.builder.where(eye, square, ctx.scalar(0, x.shape.dtype))
    return ctx.builder.reduce_sum(kept, 2)


def for_columns(ctx: Context, count: int, step: Step, *state: Op) -> list[Op]:
    """The state after `step` for each of `count` columns."""
    if not count or not state[0].shape.size:
        return list(state)

    def unfinished(inner: Builder, column: Op, *rest: Op) -> Op:
        return inner.less_than(column, limit)

    def body(inner: Builder, column: Op, *rest: Op) -> tuple[Op, ...]:
        return (inner.add(column, one), *step(ctx.within(inner), column, rest))

    limit, one, zero = (ctx.scalar(number, DType.INT32) for number in (count, 1, 0))
    return list(ctx.builder.while_loop(unfinished, body, zero, *state)[1:])


def part_at(ctx: Context, x: Op, starts: Sequence[Op | None], sizes: Sequence[int]) -> Op:
    zero = ctx.scalar(0, DType.INT32)
    return ctx.builder.dynamic_slice(x, [zero if start is None else start for start in starts], sizes)


def put_at(ctx: Context, x: Op, part: Op, starts: Sequence[Op | None]) -> Op:
    zero = ctx.scalar(0, DType.INT32)
    return ctx.builder.dynamic_update_slice(x, part, [zero if start is None else start for start in starts])


def first_true(ctx: Context, wrong: Op) -> Op:
    """(batch, n) bool -> (batch,) int32: the number of the first that is, from 1; 0 without any."""
    b, count = ctx.builder, wrong.shape.dimensions[1]
    if not wrong.shape.size:
        return ctx.full(wrong.shape.dimensions[:1], 0, DType.INT32)
    numbers = b.where(wrong, index_along(ctx, wrong, 1), ctx.scalar(count, DType.INT32))
    least = b.reduce_min(numbers, 1)
    found = b.less_than(least, ctx.scalar(count, DType.INT32))
    return b.where(found, b.add(least, ctx.scalar(1, DType.INT32)), ctx.scalar(0, DType.INT32))
