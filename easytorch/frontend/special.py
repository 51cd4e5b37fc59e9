"""Registers special functions of one argument, which are computed in float64."""

from __future__ import annotations

from collections.abc import Callable

from easytorch.backends.dtypes import DType
from easytorch.backends.graph import Op
from easytorch.frontend.context import Context
from easytorch.frontend.registry import Target, lowering
from easytorch.frontend.terms import Term

Function = Callable[[Term], Term]


def special(*targets: Target) -> Callable[[Function], Function]:
    """The decorated function, from float64 to float64, as the lowering of `targets`. `in_float64` for several operands.

    Float64 for float32 too: differences of nearly equal numbers in these formulas, and XLA's float32 functions, cost
    more digits than float32 has to spare.
    """

    def register(function: Function) -> Function:
        def lowered(ctx: Context, x: Op) -> Op:
            return in_float64(ctx, function, x)

        lowering(*targets)(lowered)
        return function

    return register


def in_float64(ctx: Context, function: Callable[..., Term], *values: Op | float) -> Op:
    """`function` of the values, broadcast, in float64; the result is of the type that ATen gives it."""
    kind = ctx.floating(ctx.promote(*values))
    operands = ctx.operands(*values, dtype=DType.FLOAT64)
    dimensions = ctx.broadcast_dims(*(operand.shape.dimensions for operand in operands))
    terms = (Term(ctx.builder, ctx.expand(operand, dimensions)) for operand in operands)
    return ctx.cast(function(*terms).op, kind)
