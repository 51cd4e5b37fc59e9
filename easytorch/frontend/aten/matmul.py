"""Matrix products; each is one `dot_general`.

Narrow floats are multiplied as they are: the backends accumulate in float32 and round once, as ATen's kernels do.
"""

from __future__ import annotations

import torch

from easytorch.backends.dtypes import DType
from easytorch.backends.graph import Op
from easytorch.frontend.context import Context
from easytorch.frontend.registry import lowering

aten = torch.ops.aten
Number = int | float


@lowering(aten.mm.default)
def mm(ctx: Context, x: Op, other: Op) -> Op:
    return ctx.builder.dot_general(x, (1,), (), other, (0,), ())


@lowering(aten.bmm.default)
def bmm(ctx: Context, x: Op, other: Op) -> Op:
    return ctx.builder.dot_general(x, (2,), (0,), other, (1,), (0,))


@lowering(aten.mv.default, aten.dot.default)
def mv(ctx: Context, x: Op, other: Op) -> Op:
    return ctx.builder.dot_general(x, (x.shape.rank - 1,), (), other, (0,), ())


@lowering(aten.matmul.default)
def matmul(ctx: Context, x: Op, other: Op) -> Op:
    """Of vectors, matrices and stacks of them; the axes before the last two broadcast."""
    if other.shape.rank <= 2:
        return ctx.builder.dot_general(x, (x.shape.rank - 1,), (), other, (0,), ())
    row = x.shape.rank == 1
    left = ctx.reshape(x, (1, *x.shape.dimensions)) if row else x
    batch = ctx.broadcast_dims(left.shape.dimensions[:-2], other.shape.dimensions[:-2])
    left = ctx.expand(left, (*batch, *left.shape.dimensions[-2:]))
    right = ctx.expand(other, (*batch, *other.shape.dimensions[-2:]))
    axes = tuple(range(len(batch)))
    result = ctx.builder.dot_general(left, (len(batch) + 1,), axes, right, (len(batch),), axes)
    return ctx.reshape(result, (*batch, result.shape.dimensions[-1])) if row else result


@lowering(aten.linear.default)
def linear(ctx: Context, x: Op, weight: Op, bias: Op | None = None) -> Op:
    """x weight^T + bias; the weight is contracted in its own layout, without a transposed copy."""
    result = ctx.builder.dot_general(x, (x.shape.rank - 1,), (), weight, (weight.shape.rank - 1,), ())
    if bias is None:
        return result
    return ctx.builder.add(result, ctx.expand(bias, result.shape.dimensions))


@lowering(aten.addmm.default)
def addmm(ctx: Context, x: Op, mat1: Op, mat2: Op, *, beta: Number = 1, alpha: Number = 1) -> Op:
    return _plus(ctx, x, mm(ctx, mat1, mat2), beta, alpha)


@lowering(aten.baddbmm.default)
def baddbmm(ctx: Context, x: Op, batch1: Op, batch2: Op, *, beta: Number = 1, alpha: Number = 1) -> Op:
    return _plus(ctx, x, bmm(ctx, batch1, batch2), beta, alpha)


@lowering(aten.addbmm.default)
def addbmm(ctx: Context, x: Op, batch1: Op, batch2: Op, *, beta: Number = 1, alpha: Number = 1) -> Op:
    return _plus(ctx, x, ctx.builder.dot_general(batch1, (0, 2), (), batch2, (0, 1), ()), beta, alpha)


@lowering(aten.addmv.default)
def addmv(ctx: Context, x: Op, mat: Op, vec: Op, *, beta: Number = 1, alpha: Number = 1) -> Op:
    return _plus(ctx, x, mv(ctx, mat, vec), beta, alpha)


def _plus(ctx: Context, x: Op, product: Op, beta: Number, alpha: Number) -> Op:
    """beta x + alpha product. With beta zero x is ignored, including its NaN."""
    if alpha != 1:
        product = ctx.builder.mul(product, ctx.scalar(alpha, product.shape.dtype))
    if beta == 0:
        return product
    if beta != 1:
        x = ctx.builder.mul(x, ctx.scalar(beta, x.shape.dtype))
    return ctx.builder.add(ctx.expand(x, product.shape.dimensions), product)


@lowering(aten.outer.default)
def outer(ctx: Context, x: Op, other: Op) -> Op:
    first, second = ctx.operands(
        ctx.reshape(x, (x.shape.size, 1)), ctx.reshape(other, (1, other.shape.size)), dtype=ctx.promote(x, other)
    )
    return ctx.builder.logical_and(first, second) if first.shape.dtype is DType.BOOL else ctx.builder.mul(first, second)


@lowering(aten.bilinear.default)
def bilinear(ctx: Context, x: Op, other: Op, weight: Op, bias: Op | None = None) -> Op:
    """(..., I), (..., J), (O, I, J) -> (..., O)."""
    outer = x.shape.dimensions[:-1]
    first = ctx.reshape(x, (-1, x.shape.dimensions[-1]))
    second = ctx.reshape(other, (-1, other.shape.dimensions[-1]))
    by_first = ctx.builder.dot_general(first, (1,), (), weight, (1,), ())
    result = ctx.builder.dot_general(by_first, (2,), (0,), second, (1,), (0,))
    if bias is not None:
        result = ctx.builder.add(result, ctx.expand(bias, result.shape.dimensions))
    return ctx.reshape(result, (*outer, weight.shape.dimensions[0]))


@lowering(aten._trilinear.default)
def trilinear(
    ctx: Context,
    x1: Op,
    x2: Op,
    x3: Op,
    expand1: list[int],
    expand2: list[int],
    expand3: list[int],
    sumdim: list[int],
    unroll_dim: int = 1,
) -> Op:
    """The product of three, each with new axes where `expand` says, summed over `sumdim`."""
    factors = []
    for x, new in ((x1, expand1), (x2, expand2), (x3, expand3)):
        dims = list(x.shape.dimensions)
        for axis in sorted(new):
            dims.insert(axis, 1)
        factors.append(ctx.reshape(x, dims))
    product = ctx.builder.mul(ctx.builder.mul(factors[0], factors[1]), factors[2])
    return ctx.reduce(ctx.builder.reduce_sum, product, sumdim) if sumdim else product
