"""Eigenvalues of symmetric and Hermitian matrices, singular values, and what is made of them: the pseudo-inverse.

By Jacobi's rotations, all matrices of a stack at once: two-sided for eigenvalues, one-sided (Hestenes, 1958) for
singular values. Vectors are defined up to a factor of modulus 1, and need not have LAPACK's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import ml_dtypes
import torch

from easytorch.backends.dtypes import DType
from easytorch.backends.graph import Op
from easytorch.frontend.arrays import take
from easytorch.frontend.aten.indexing import gather
from easytorch.frontend.aten.linalg import qr
from easytorch.frontend.context import Context
from easytorch.frontend.matrices import (
    adjoint_of,
    as_stack,
    diagonal_of,
    identity,
    index_along,
    product,
    triangle,
    unstack,
)
from easytorch.frontend.registry import lowering
from easytorch.frontend.rotations import rotated_until, rotation, turned_columns

aten = torch.ops.aten


def _epsilon(dtype: DType) -> float:
    return float(ml_dtypes.finfo(dtype.real.numpy).eps)


def _largest(ctx: Context, x: Op) -> Op:
    """The largest absolute value of each matrix of (batch, m, n), or 1 of zeros: (batch, 1, 1)."""
    b = ctx.builder
    largest = ctx.reduce(b.reduce_max, b.abs(x), (1, 2), True)
    kind = largest.shape.dtype
    return b.where(b.equal(largest, ctx.scalar(0, kind)), ctx.scalar(1, kind), largest)


def _real(ctx: Context, x: Op) -> Op:
    return ctx.builder.real(x) if x.shape.dtype.is_complex else x


def _in_order(ctx: Context, values: Op, descending: bool, *columns: Op) -> list[Op]:
    """`values` (batch, n) sorted, and the columns of (batch, m, n) as they go with them."""
    b = ctx.builder
    before = "greater_than" if descending else "less_than"
    found = b.sort(
        lambda inner, one, other, *_: getattr(inner, before)(one, other),
        1,
        True,
        values,
        index_along(ctx, values, 1),
    )
    batch, width = values.shape.dimensions
    sorted_ = [found[0]]
    for x in columns:
        places = ctx.reshape(found[1], (batch, 1, width))
        sorted_.append(gather(ctx, x, 2, ctx.expand(places, x.shape.dimensions)))
    return sorted_


# --- eigenvalues


def _eigh(ctx: Context, a: Op) -> tuple[Op, Op]:
    """Ascending eigenvalues (batch, n) and eigenvectors of a Hermitian (batch, n, n)."""
    batch, size, _ = a.shape.dimensions
    kind = a.shape.dtype
    scale = _largest(ctx, a)

    def turn(ctx: Context, partners: Op, state: Sequence[Op]) -> tuple[Sequence[Op], Op]:
        b, (matrix, vectors) = ctx.builder, state
        # Element i of these is the matrix's at (partner of i, i).
        beside = diagonal_of(ctx, take(ctx, matrix, 1, partners))
        own = _real(ctx, diagonal_of(ctx, matrix))
        cosine, factor = rotation(ctx, partners, own, take(ctx, own, 1, partners), beside)
        for _ in range(2):
            matrix = adjoint_of(ctx, turned_columns(ctx, matrix, partners, cosine, factor))
        pairs = b.equal(index_along(ctx, matrix, 1), ctx.expand(partners, matrix.shape.dimensions))
        pairs = b.logical_and(pairs, b.not_equal(index_along(ctx, matrix, 1), index_along(ctx, matrix, 2)))
        # What rounding leaves of the elements that are made 0 would keep the sweeps going.
        matrix = b.where(pairs, ctx.scalar(0, kind), matrix)
        apart = b.not_equal(partners, ctx.iota((size,), 0, DType.INT32))
        off = b.where(ctx.expand(apart, (batch, size)), b.abs(beside), ctx.scalar(0, kind.real))
        return (matrix, turned_columns(ctx, vectors, partners, cosine, factor)), b.reduce_max(off, (0, 1))

    shrunk = ctx.builder.div(a, ctx.cast(scale, kind))
    matrix, vectors = rotated_until(ctx, turn, _epsilon(kind), size, shrunk, identity(ctx, batch, size, kind))
    values = ctx.builder.mul(_real(ctx, diagonal_of(ctx, matrix)), ctx.reshape(scale, (batch, 1)))
    values, vectors = _in_order(ctx, values, False, vectors)
    return values, vectors


def _hermitian(ctx: Context, a: Op, lower: bool) -> Op:
    """The Hermitian matrices of one triangle of (batch, n, n); imaginary parts on the diagonal count as 0."""
    b, kind = ctx.builder, a.shape.dtype
    half = triangle(ctx, a if lower else adjoint_of(ctx, a), True, 0.0)
    eye = identity(ctx, a.shape.dimensions[0], a.shape.dimensions[1], DType.BOOL)
    middle = b.where(eye, ctx.cast(_real(ctx, a), kind), ctx.scalar(0, kind))
    return b.add(b.add(half, adjoint_of(ctx, half)), middle)


@lowering(aten._linalg_eigh.default)
def eigh(ctx: Context, a: Op, uplo: str = "L", compute_v: bool = True) -> tuple[Op, Op]:
    values, vectors = _eigh(ctx, _hermitian(ctx, as_stack(ctx, a), uplo in "Ll"))
    return unstack(ctx, values, a), unstack(ctx, vectors, a) if compute_v else ctx.full((0,), 0, a.shape.dtype)


# --- singular values


def _svd(ctx: Context, a: Op) -> tuple[Op, Op, Op]:
    """U (batch, n, n), the descending S (batch, n) and V (batch, n, n) of square matrices."""
    batch, size, _ = a.shape.dimensions
    kind, b = a.shape.dtype, ctx.builder
    scale = _largest(ctx, a)

    def turn(ctx: Context, partners: Op, state: Sequence[Op]) -> tuple[Sequence[Op], Op]:
        b, (columns, vectors) = ctx.builder, state
        other = take(ctx, columns, 2, partners)
        conjugate = b.conj(other) if kind.is_complex else other
        beside = b.reduce_sum(b.mul(conjugate, columns), 1)
        square = b.mul(b.abs(columns), b.abs(columns))
        own = b.reduce_sum(square, 1)
        lengths = take(ctx, own, 1, partners)
        cosine, factor = rotation(ctx, partners, own, lengths, beside)
        apart = b.not_equal(partners, ctx.iota((size,), 0, DType.INT32))
        zero = ctx.scalar(0, kind.real)
        bound = b.mul(b.sqrt(own), b.sqrt(lengths))
        compared = b.logical_and(ctx.expand(apart, (batch, size)), b.greater_than(bound, zero))
        angle = b.where(compared, b.div(b.abs(beside), b.where(compared, bound, ctx.scalar(1, kind.real))), zero)
        turned = [turned_columns(ctx, x, partners, cosine, factor) for x in (columns, vectors)]
        return turned, b.reduce_max(angle, (0, 1))

    shrunk = b.div(a, ctx.cast(scale, kind))
    # What rounding leaves of the product of two columns grows with their length.
    tolerance = _epsilon(kind) * max(4.0, math.sqrt(size))
    columns, vectors = rotated_until(ctx, turn, tolerance, size, shrunk, identity(ctx, batch, size, kind))
    square = b.mul(b.abs(columns), b.abs(columns))
    values, columns, vectors = _in_order(ctx, b.sqrt(b.reduce_sum(square, 1)), True, columns, vectors)
    # The columns are orthogonal: their Q is U up to signs, and completes it where singular values are 0.
    q, r = qr(ctx, columns)
    phase = b.sign(diagonal_of(ctx, r))
    phase = b.where(b.equal(phase, ctx.scalar(0, kind)), ctx.scalar(1, kind), phase)
    u = b.mul(q, ctx.reshape(phase, (batch, 1, size)))
    return u, b.mul(values, ctx.reshape(scale, (batch, 1))), vectors


def _svd_of_any(ctx: Context, a: Op, full: bool) -> tuple[Op, Op, Op]:
    """U, S and V^H of (batch, m, n)."""
    batch, height, width = a.shape.dimensions
    if height < width:
        u, values, vh = _svd_of_any(ctx, adjoint_of(ctx, a), full)
        return adjoint_of(ctx, vh), values, adjoint_of(ctx, u)
    q, r = qr(ctx, a, "complete" if full else "reduced")
    r = ctx.builder.slice(r, (0, 0, 0), (batch, width, width))
    u, values, v = _svd(ctx, r)
    left = product(ctx, ctx.builder.slice(q, (0, 0, 0), (batch, height, width)), u)
    if full and height > width:
        rest = ctx.builder.slice(q, (0, 0, width), (batch, height, height))
        left = ctx.builder.concatenate(2, left, rest)
    return left, values, adjoint_of(ctx, v)


@lowering(aten._linalg_svd.default)
def svd(
    ctx: Context, a: Op, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[Op, Op, Op]:
    stack, kind = as_stack(ctx, a), a.shape.dtype
    batch, height, width = stack.shape.dimensions
    if stack.shape.size:
        found = _svd_of_any(ctx, stack, full_matrices)
    else:
        # Of nothing the vectors are those of the identity.
        count = min(height, width)
        u, vh = (identity(ctx, batch, size if full_matrices else 0, kind) for size in (height, width))
        if not full_matrices:
            u, vh = ctx.full((batch, height, count), 0, kind), ctx.full((batch, count, width), 0, kind)
        found = u, ctx.full((batch, count), 0, kind.real), vh
    u, values, vh = (unstack(ctx, x, a) for x in found)
    nothing = ctx.full((0,), 0, kind)
    return (u, values, vh) if compute_uv else (nothing, values, nothing)


@lowering(aten.linalg_pinv.atol_rtol_tensor)
def pinv(ctx: Context, a: Op, *, atol: Op | None = None, rtol: Op | None = None, hermitian: bool = False) -> Op:
    """V S^-1 U^H without the singular values that are at most max(atol, rtol * the largest)."""
    b, stack, kind = ctx.builder, as_stack(ctx, a), a.shape.dtype.real
    batch, height, width = stack.shape.dimensions
    if not stack.shape.size:
        return ctx.full((*a.shape.dimensions[:-2], width, height), 0, a.shape.dtype)
    dimensions = a.shape.dimensions[:-2]

    def bound_of(given: Op) -> Op:
        return ctx.reshape(ctx.expand(ctx.cast(given, kind), dimensions), (batch, 1))

    zero = ctx.scalar(0, kind)
    absolute = bound_of(zero if atol is None else atol)
    if rtol is None:
        # A positive absolute bound is the only one.
        default = ctx.scalar(_epsilon(kind) * max(height, width), kind)
        relative = b.where(b.greater_than(absolute, zero), zero, default)
    else:
        relative = bound_of(rtol)
    if hermitian:
        values, u = _eigh(ctx, _hermitian(ctx, stack, True))
        v = u
    else:
        u, values, vh = _svd_of_any(ctx, stack, False)
        v = adjoint_of(ctx, vh)
    size = b.abs(values)
    largest = ctx.reduce(b.reduce_max, size, (1,), True)
    bound = b.max(b.mul(relative, largest), absolute)
    inverse = b.where(b.greater_than(size, bound), b.div(ctx.scalar(1, kind), values), zero)
    scaled = b.mul(v, ctx.cast(ctx.reshape(inverse, (batch, 1, values.shape.dimensions[1])), a.shape.dtype))
    return unstack(ctx, product(ctx, scaled, adjoint_of(ctx, u)), a)
