"""The exponential of matrices by scaling and squaring (Higham, 2005)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from easytorch.backends.builder import Builder
from easytorch.backends.dtypes import DType
from easytorch.backends.graph import Op
from easytorch.frontend.aten.linalg import lu_factor, lu_solve
from easytorch.frontend.context import Context
from easytorch.frontend.matrices import as_stack, identity, product, unstack
from easytorch.frontend.registry import lowering

aten = torch.ops.aten

# Of the numerator of Padé's approximant of degree 13; the denominator's alternate in sign.
_PADE = (
    *(64764752532480000, 32382376266240000, 7771770303897600, 1187353796428800, 129060195264000, 10559470521600),
    *(670442572800, 33522128640, 1323241920, 40840800, 960960, 16380, 182, 1),
)
# Up to this 1-norm the approximant is exact in float64.
_RADIUS = 5.371920351148152
# Of 2^1024 every element is infinite or the matrix's exponential is 0.
_MOST = 1030


def _powers(ctx: Context, even: Sequence[Op], coefficients: Sequence[int]) -> Op:
    """The sum of even powers of a matrix by their coefficients."""
    b, kind = ctx.builder, even[0].shape.dtype
    total = b.mul(even[0], ctx.scalar(float(coefficients[0]), kind))
    for power, coefficient in zip(even[1:], coefficients[1:], strict=True):
        total = b.add(total, b.mul(power, ctx.scalar(float(coefficient), kind)))
    return total


def _pade(ctx: Context, a: Op) -> Op:
    batch, size, _ = a.shape.dimensions
    b = ctx.builder
    square = product(ctx, a, a)
    even = [identity(ctx, batch, size, a.shape.dtype), square]
    even += [product(ctx, square, square)]
    even += [product(ctx, even[2], square)]
    high = even[1:]

    def of(coefficients: Sequence[int]) -> Op:
        above = product(ctx, even[3], _powers(ctx, high, coefficients[4:]))
        return b.add(_powers(ctx, even, coefficients[:4]), above)

    odd, rest = product(ctx, a, of(_PADE[1::2])), of(_PADE[::2])
    return lu_solve(ctx, *lu_factor(ctx, b.sub(rest, odd)), b.add(rest, odd))


@lowering(aten.linalg_matrix_exp.default, aten.matrix_exp.default)
def matrix_exp(ctx: Context, a: Op) -> Op:
    """In float64, of float32 too: squaring doubles the error each time."""
    stack = as_stack(ctx, a)
    if not stack.shape.size:
        return a
    kind = DType.COMPLEX128 if a.shape.dtype.is_complex else DType.FLOAT64
    b, stack = ctx.builder, ctx.cast(stack, kind)
    norm = ctx.reduce(b.reduce_max, ctx.reduce(b.reduce_sum, b.abs(stack), (1,), True), (2,), True)
    real = norm.shape.dtype
    ratio = b.max(b.div(norm, ctx.scalar(_RADIUS, real)), ctx.scalar(1.0, real))
    times = b.ceil(b.div(b.log(ratio), ctx.scalar(0.6931471805599453, real)))
    # NaN where the matrix is not finite: then nothing is squared, and the result is not finite either.
    times = b.where(b.is_finite(times), b.min(times, ctx.scalar(float(_MOST), real)), ctx.scalar(0.0, real))
    shrunk = b.mul(stack, ctx.cast(b.pow(ctx.scalar(0.5, real), times), kind))
    count, one = b.reduce_max(times, (0, 1, 2)), ctx.scalar(1.0, real)

    def unfinished(inner: Builder, done: Op, found: Op) -> Op:
        return inner.less_than(done, count)

    def squared(inner: Builder, done: Op, found: Op) -> tuple[Op, Op]:
        doubled = product(ctx.within(inner), found, found)
        more = inner.less_than(done, times)
        return inner.add(done, one), inner.where(ctx.within(inner).expand(more, found.shape.dimensions), doubled, found)

    found = b.while_loop(unfinished, squared, ctx.scalar(0.0, real), _pade(ctx, shrunk))[1]
    return unstack(ctx, ctx.cast(found, a.shape.dtype), a)
