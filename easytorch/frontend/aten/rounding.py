"""Rounding to decimals."""

from __future__ import annotations

import torch

from easytorch.backends.graph import Op
from easytorch.frontend.context import Context
from easytorch.frontend.registry import lowering

aten = torch.ops.aten


@lowering(aten.round.decimals)
def round_decimals(ctx: Context, x: Op, *, decimals: int) -> Op:
    """Halves to the even digit, of x times the power of ten, as ATen; integers have no decimals."""
    b, kind = ctx.builder, x.shape.dtype
    if kind.is_integer:
        return x
    if not decimals:
        return b.round(x)
    wide = ctx.wide(x)
    ten = ctx.scalar(10.0 ** abs(decimals), wide.shape.dtype)
    there, back = (b.mul, b.div) if decimals > 0 else (b.div, b.mul)
    return ctx.cast(back(b.round(there(wide, ten)), ten), kind)
