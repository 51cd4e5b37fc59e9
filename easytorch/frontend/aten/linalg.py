"""Triangular systems, and the factorizations of Cholesky, of Gauss (LU with partial pivoting) and of Householder (QR).

Factorizations go column by column, all matrices of a stack at once. Where torch raises for a singular or indefinite
matrix, a program gives infinities or NaN, and `info` where there is one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from easytorch.backends.dtypes import DType
from easytorch.backends.graph import Op
from easytorch.backends.shapes import Shape
from easytorch.frontend.aten.indexing import gather
from easytorch.frontend.context import Context
from easytorch.frontend.errors import UnsupportedOpError
from easytorch.frontend.matrices import (
    adjoint_of,
    as_stack,
    diagonal_of,
    first_true,
    for_columns,
    identity,
    index_along,
    part_at,
    product,
    put_at,
    transposed,
    triangle,
    unstack,
)
from easytorch.frontend.registry import lowering

aten = torch.ops.aten


# --- triangular systems


@lowering(aten.linalg_solve_triangular.default)
def solve_triangular(ctx: Context, a: Op, b: Op, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Op:
    """X with A X = B, or X A = B; the batch axes broadcast."""
    batch = ctx.broadcast_dims(a.shape.dimensions[:-2], b.shape.dimensions[:-2])
    a, b = (ctx.expand(x, (*batch, *x.shape.dimensions[-2:])) for x in (a, b))
    return ctx.builder.triangular_solve(a, b, left, not upper, unitriangular)


@lowering(aten.triangular_solve.default)
def triangular_solve(
    ctx: Context, b: Op, a: Op, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Op, Op]:
    batch = ctx.broadcast_dims(a.shape.dimensions[:-2], b.shape.dimensions[:-2])
    a, b = (ctx.expand(x, (*batch, *x.shape.dimensions[-2:])) for x in (a, b))
    turned = transposed(ctx, a) if transpose else a
    return ctx.builder.triangular_solve(turned, b, True, upper == transpose, unitriangular), a


@lowering(aten._linalg_check_errors.default)
def check_errors(ctx: Context, info: Op, api_name: str, *, is_matrix: bool) -> None:
    """No error: a compiled program cannot raise, and gives NaN or infinities where ATen would."""


@lowering(torch.ops.higher_order.with_effects)
def with_effects(
    ctx: Context, token: Op, operation: torch._ops.OpOverload, *args: Any, **kwargs: Any
) -> tuple[Any, ...]:
    """AOTAutograd wraps an operation that may raise in this, to keep its order."""
    if operation is not aten._linalg_check_errors.default:
        raise UnsupportedOpError(f"{operation}: no lowering for an operation with effects")
    return token, None


# --- Cholesky


def _cholesky(ctx: Context, a: Op) -> Op:
    """The lower Cholesky factor of (batch, n, n), whose lower triangle is read; NaN from the first bad pivot on."""
    batch, size, _ = a.shape.dimensions

    def step(ctx: Context, column: Op, state: Sequence[Op]) -> Sequence[Op]:
        b, (rest, factor) = ctx.builder, state
        values = part_at(ctx, rest, (None, None, column), (batch, size, 1))
        pivot = part_at(ctx, values, (None, column, None), (batch, 1, 1))
        if pivot.shape.dtype.is_complex:
            pivot = ctx.cast(b.real(pivot), pivot.shape.dtype)
            root = ctx.cast(b.sqrt(b.real(pivot)), pivot.shape.dtype)
        else:
            root = b.sqrt(pivot)
        rows = index_along(ctx, values, 1)
        below = b.where(b.greater_than(rows, column), b.div(values, root), ctx.scalar(0, rest.shape.dtype))
        found = b.where(b.equal(rows, column), ctx.expand(root, values.shape.dimensions), below)
        return b.sub(rest, b.mul(below, adjoint_of(ctx, below))), put_at(ctx, factor, found, (None, None, column))

    return for_columns(ctx, size, step, a, ctx.full(a.shape.dimensions, 0, a.shape.dtype))[1]


@lowering(aten.linalg_cholesky_ex.default)
def cholesky_ex(ctx: Context, x: Op, *, upper: bool = False, check_errors: bool = False) -> tuple[Op, Op]:
    stack = as_stack(ctx, x)
    factor = _cholesky(ctx, adjoint_of(ctx, stack) if upper else stack)
    diagonal = diagonal_of(ctx, factor)
    real = ctx.builder.real(diagonal) if diagonal.shape.dtype.is_complex else diagonal
    positive = ctx.builder.greater_than(real, ctx.scalar(0, real.shape.dtype))
    info = first_true(ctx, ctx.builder.logical_not(positive))
    return unstack(ctx, adjoint_of(ctx, factor) if upper else factor, x), unstack(ctx, info, x)


@lowering(aten.cholesky.default, aten.linalg_cholesky.default)
def cholesky(ctx: Context, x: Op, upper: bool = False) -> Op:
    return cholesky_ex(ctx, x, upper=upper)[0]


@lowering(aten.cholesky_solve.default)
def cholesky_solve(ctx: Context, b: Op, factor: Op, upper: bool = False) -> Op:
    batch = ctx.broadcast_dims(factor.shape.dimensions[:-2], b.shape.dimensions[:-2])
    factor, b = (ctx.expand(x, (*batch, *x.shape.dimensions[-2:])) for x in (factor, b))
    first = ctx.builder.triangular_solve(factor, b, True, not upper, adjoint=upper)
    return ctx.builder.triangular_solve(factor, first, True, not upper, adjoint=not upper)


@lowering(aten.cholesky_inverse.default)
def cholesky_inverse(ctx: Context, factor: Op, upper: bool = False) -> Op:
    stack = as_stack(ctx, factor)
    eye = identity(ctx, stack.shape.dimensions[0], stack.shape.dimensions[-1], factor.shape.dtype)
    return unstack(ctx, cholesky_solve(ctx, eye, stack, upper), factor)


# --- Gauss


def _swapped(ctx: Context, x: Op, row: Op, others: Op) -> Op:
    """(batch, m, n) with the rows `row` and `others` (batch, 1) swapped."""
    b, dimensions = ctx.builder, x.shape.dimensions
    rows = ctx.iota(dimensions[:2], 1, DType.INT32)
    places = b.where(b.equal(rows, others), row, rows)
    places = b.where(b.equal(rows, row), ctx.expand(others, dimensions[:2]), places)
    return _rows(ctx, x, places)


def _rows(ctx: Context, x: Op, places: Op) -> Op:
    """Row `places[i, j]` of matrix i as row j."""
    index = Shape(DType.INT32, (*places.shape.dimensions, x.shape.dimensions[2]))
    return gather(ctx, x, 1, ctx.builder.broadcast_in_dim(places, index, (0, 1)))


def _lu(ctx: Context, a: Op, pivot: bool = True) -> tuple[Op, Op]:
    """(batch, m, n) -> L and U in one, and the row (from 1) that each was swapped with: (batch, min(m, n)) int32"""
    batch, height, width = a.shape.dimensions
    count = min(height, width)

    def step(ctx: Context, column: Op, state: Sequence[Op]) -> Sequence[Op]:
        b, (rest, pivots) = ctx.builder, state
        kind = rest.shape.dtype
        if pivot:
            values = ctx.reshape(part_at(ctx, rest, (None, None, column), (batch, height, 1)), (batch, height))
            size = b.add(b.abs(b.real(values)), b.abs(b.imag(values))) if kind.is_complex else b.abs(values)
            rows = index_along(ctx, size, 1)
            size = b.where(b.greater_or_equal(rows, column), size, ctx.scalar(-1, size.shape.dtype))
            chosen = ctx.reshape(b.arg_min_max(size, 1, DType.INT32, False), (batch, 1))
            rest = _swapped(ctx, rest, column, chosen)
        else:
            chosen = ctx.expand(column, (batch, 1))
        rows, columns = index_along(ctx, rest, 1), index_along(ctx, rest, 2)
        zero = ctx.scalar(0, kind)
        leading = part_at(ctx, rest, (None, column, column), (batch, 1, 1))
        divisor = b.where(b.equal(leading, zero), ctx.scalar(1, kind), leading)
        values = part_at(ctx, rest, (None, None, column), (batch, height, 1))
        below = b.greater_than(index_along(ctx, values, 1), column)
        factors = b.where(below, b.div(values, divisor), zero)
        row = part_at(ctx, rest, (None, column, None), (batch, 1, width))
        row = b.where(b.greater_than(index_along(ctx, row, 2), column), row, zero)
        inside = b.logical_and(b.greater_than(rows, column), b.greater_than(columns, column))
        rest = b.where(inside, b.sub(rest, b.mul(factors, row)), rest)
        rest = put_at(ctx, rest, b.where(below, factors, values), (None, None, column))
        return rest, put_at(ctx, pivots, b.add(chosen, ctx.scalar(1, DType.INT32)), (None, column))

    first = ctx.full((batch, count), 1, DType.INT32)
    found = for_columns(ctx, count, step, a, first)
    return found[0], found[1]


def _permutation(ctx: Context, pivots: Op, height: int) -> Op:
    """(batch, k) rows swapped, from 1 -> (batch, height): the resulting permutation."""
    batch, count = pivots.shape.dimensions

    def step(ctx: Context, column: Op, state: Sequence[Op]) -> Sequence[Op]:
        other = ctx.builder.sub(part_at(ctx, pivots, (None, column), (batch, 1)), ctx.scalar(1, DType.INT32))
        return [_swapped(ctx, state[0], column, other)]

    start = ctx.iota((batch, height, 1), 1, DType.INT32)
    return ctx.reshape(for_columns(ctx, count, step, start)[0], (batch, height))


def _lu_solve(ctx: Context, lu: Op, pivots: Op, b: Op, adjoint: bool = False) -> Op:
    """X with A X = B, or A^H X = B, of (batch, n, n), (batch, n), (batch, n, k)."""
    solve = ctx.builder.triangular_solve
    places = _permutation(ctx, pivots, lu.shape.dimensions[1])
    if not adjoint:
        return solve(lu, solve(lu, _rows(ctx, b, places), True, True, True), True, False)
    found = solve(lu, solve(lu, b, True, False, adjoint=True), True, True, True, adjoint=True)
    back = ctx.builder.sort(lambda inner, p, q, *_: inner.less_than(p, q), 1, True, places, index_along(ctx, places, 1))
    return _rows(ctx, found, back[1])


def _info(ctx: Context, lu: Op) -> Op:
    diagonal = diagonal_of(ctx, lu)
    return first_true(ctx, ctx.builder.equal(diagonal, ctx.scalar(0, diagonal.shape.dtype)))


@lowering(aten.linalg_lu_factor_ex.default)
def lu_factor_ex(ctx: Context, a: Op, *, pivot: bool = True, check_errors: bool = False) -> tuple[Op, Op, Op]:
    lu, pivots = _lu(ctx, as_stack(ctx, a), pivot)
    return unstack(ctx, lu, a), unstack(ctx, pivots, a), unstack(ctx, _info(ctx, lu), a)


@lowering(aten.linalg_lu_factor.default)
def lu_factor(ctx: Context, a: Op, *, pivot: bool = True) -> tuple[Op, Op]:
    return lu_factor_ex(ctx, a, pivot=pivot)[:2]


@lowering(aten.lu_unpack.default)
def lu_unpack(
    ctx: Context, lu: Op, pivots: Op, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[Op, Op, Op]:
    stack, kind = as_stack(ctx, lu), lu.shape.dtype
    batch, height, width = stack.shape.dimensions
    count = min(height, width)
    nothing = ctx.full((0,), 0, kind)
    permutation, lower, upper = nothing, nothing, nothing
    if unpack_data:
        lower = ctx.builder.slice(stack, (0, 0, 0), (batch, height, count))
        upper = ctx.builder.slice(stack, (0, 0, 0), (batch, count, width))
        lower = unstack(ctx, triangle(ctx, lower, True, 1.0), lu)
        upper = unstack(ctx, triangle(ctx, upper, False), lu)
    if unpack_pivots:
        places = _permutation(ctx, ctx.reshape(pivots, (batch, count)), height)
        rows = _rows(ctx, identity(ctx, batch, height, kind), places)
        permutation = unstack(ctx, transposed(ctx, rows), lu)
    return permutation, lower, upper


@lowering(aten.linalg_lu.default)
def lu(ctx: Context, a: Op, *, pivot: bool = True) -> tuple[Op, Op, Op]:
    factors, pivots, _ = lu_factor_ex(ctx, a, pivot=pivot)
    permutation, lower, upper = lu_unpack(ctx, factors, pivots, True, pivot)
    return permutation, lower, upper


@lowering(aten.linalg_lu_solve.default)
def lu_solve(ctx: Context, lu: Op, pivots: Op, b: Op, *, left: bool = True, adjoint: bool = False) -> Op:
    """X with A X = B, or X A = B; the batch axes broadcast."""
    batch = ctx.broadcast_dims(lu.shape.dimensions[:-2], b.shape.dimensions[:-2])
    lu, b = (ctx.expand(x, (*batch, *x.shape.dimensions[-2:])) for x in (lu, b))
    count = pivots.shape.dimensions[-1]
    flat = ctx.reshape(ctx.expand(pivots, (*batch, count)), (math.prod(batch), count))
    if left:
        return unstack(ctx, _lu_solve(ctx, as_stack(ctx, lu), flat, as_stack(ctx, b), adjoint), b)
    found = _lu_solve(ctx, as_stack(ctx, lu), flat, adjoint_of(ctx, as_stack(ctx, b)), not adjoint)
    return unstack(ctx, adjoint_of(ctx, found), b)


@lowering(aten._linalg_solve_ex.default)
def solve_ex(ctx: Context, a: Op, b: Op, *, left: bool = True, check_errors: bool = False) -> tuple[Op, Op, Op, Op]:
    """X with A X = B, or X A = B; B may be a stack of vectors."""
    vectors = b.shape.rank == 1 or (b.shape.rank == a.shape.rank - 1 and b.shape.dimensions == a.shape.dimensions[:-1])
    factors, pivots, info = lu_factor_ex(ctx, a)
    right = ctx.reshape(b, (*b.shape.dimensions, 1)) if vectors else b
    found = lu_solve(ctx, factors, pivots, right, left=left or vectors)
    if vectors:
        found = ctx.reshape(found, found.shape.dimensions[:-1])
    return found, factors, pivots, info


@lowering(aten.linalg_solve.default)
def solve(ctx: Context, a: Op, b: Op, *, left: bool = True) -> Op:
    return solve_ex(ctx, a, b, left=left)[0]


@lowering(aten.linalg_inv.default, aten.inverse.default)
def inv(ctx: Context, a: Op) -> Op:
    return inv_ex(ctx, a)[0]


@lowering(aten.linalg_inv_ex.default)
def inv_ex(ctx: Context, a: Op, *, check_errors: bool = False) -> tuple[Op, Op]:
    stack = as_stack(ctx, a)
    factors, pivots = _lu(ctx, stack)
    eye = identity(ctx, stack.shape.dimensions[0], stack.shape.dimensions[1], a.shape.dtype)
    return unstack(ctx, _lu_solve(ctx, factors, pivots, eye), a), unstack(ctx, _info(ctx, factors), a)


def _parity(ctx: Context, pivots: Op, dtype: DType) -> Op:
    """(batch, k) -> (batch,): 1 or -1, of the permutation."""
    b = ctx.builder
    swapped = b.not_equal(pivots, b.add(index_along(ctx, pivots, 1), ctx.scalar(1, DType.INT32)))
    one = ctx.scalar(1, dtype)
    return b.reduce_product(b.where(swapped, ctx.full(pivots.shape.dimensions, -1, dtype), one), 1)


@lowering(aten._linalg_det.default)
def det(ctx: Context, a: Op) -> tuple[Op, Op, Op]:
    factors, pivots = _lu(ctx, as_stack(ctx, a))
    found = ctx.builder.reduce_product(diagonal_of(ctx, factors), 1)
    found = ctx.builder.mul(found, _parity(ctx, pivots, a.shape.dtype))
    return unstack(ctx, found, a), unstack(ctx, factors, a), unstack(ctx, pivots, a)


@lowering(aten._linalg_slogdet.default)
def slogdet(ctx: Context, a: Op) -> tuple[Op, Op, Op, Op]:
    b = ctx.builder
    factors, pivots = _lu(ctx, as_stack(ctx, a))
    diagonal = diagonal_of(ctx, factors)
    sign = b.mul(b.reduce_product(b.sign(diagonal), 1), _parity(ctx, pivots, a.shape.dtype))
    logarithm = b.reduce_sum(b.log(b.abs(diagonal)), 1)
    sign, logarithm, factors, pivots = (unstack(ctx, x, a) for x in (sign, logarithm, factors, pivots))
    return sign, logarithm, factors, pivots


# --- Householder


@lowering(aten.linalg_qr.default)
def qr(ctx: Context, a: Op, mode: str = "reduced") -> tuple[Op, Op]:
    """Q and R by reflections, with LAPACK's signs."""
    stack, kind = as_stack(ctx, a), a.shape.dtype
    batch, height, width = stack.shape.dimensions
    count = min(height, width)

    def step(ctx: Context, column: Op, state: Sequence[Op]) -> Sequence[Op]:
        b, (r, q) = ctx.builder, state
        values = part_at(ctx, r, (None, None, column), (batch, height, 1))
        rows = index_along(ctx, values, 1)
        zero, one = ctx.scalar(0, kind), ctx.scalar(1, kind)
        tail = b.where(b.greater_than(rows, column), values, zero)
        alpha = part_at(ctx, values, (None, column, None), (batch, 1, 1))
        size = b.abs(tail)
        # divided by the largest, whose square could overflow
        largest = ctx.reduce(b.reduce_max, b.max(size, ctx.expand(b.abs(alpha), size.shape.dimensions)), (1,), True)
        none = b.equal(largest, ctx.scalar(0, largest.shape.dtype))
        unit = b.where(none, ctx.scalar(1, largest.shape.dtype), largest)
        shrunk, head = b.div(size, unit), b.div(b.abs(alpha), unit)
        squares = b.add(ctx.reduce(b.reduce_sum, b.mul(shrunk, shrunk), (1,), True), b.mul(head, head))
        length = b.mul(b.sqrt(squares), largest)
        real = b.real(alpha) if kind.is_complex else alpha
        beta = b.where(b.less_than(real, ctx.scalar(0, real.shape.dtype)), length, b.neg(length))
        idle = b.equal(ctx.reduce(b.reduce_max, size, (1,), True), ctx.scalar(0, size.shape.dtype))
        if kind.is_complex:
            idle = b.logical_and(idle, b.equal(b.imag(alpha), ctx.scalar(0, size.shape.dtype)))
        wide = ctx.cast(beta, kind)
        divisor = b.where(idle, ctx.expand(one, wide.shape.dimensions), wide)
        tau = b.where(idle, zero, b.div(b.sub(wide, alpha), divisor))
        spread = b.where(idle, ctx.expand(one, wide.shape.dimensions), b.sub(alpha, wide))
        v = b.where(b.equal(rows, column), one, b.div(tail, spread))
        conjugate = b.conj(tau) if kind.is_complex else tau
        r = b.sub(r, b.mul(b.mul(conjugate, v), product(ctx, adjoint_of(ctx, v), r)))
        q = b.sub(q, b.mul(tau, b.mul(product(ctx, q, v), adjoint_of(ctx, v))))
        return r, q

    r, q = for_columns(ctx, count, step, stack, identity(ctx, batch, height, kind))
    r = triangle(ctx, r, False)
    if mode != "complete":
        r = ctx.builder.slice(r, (0, 0, 0), (batch, count, width))
        q = ctx.builder.slice(q, (0, 0, 0), (batch, height, count))
    # ATen gives an empty vector for the Q that is not asked for
    return ctx.full((0,), 0, kind) if mode == "r" else unstack(ctx, q, a), unstack(ctx, r, a)
