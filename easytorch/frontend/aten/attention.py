"""Scaled dot product attention, as one operation for backends that have it."""

from __future__ import annotations

import torch

from easytorch.backends.dtypes import DType
from easytorch.backends.graph import Op
from easytorch.frontend.context import Context
from easytorch.frontend.errors import LoweringError
from easytorch.frontend.registry import lowering

aten = torch.ops.aten


@lowering(aten.scaled_dot_product_attention.default)
def scaled_dot_product_attention(
    ctx: Context,
    query: Op,
    key: Op,
    value: Op,
    attn_mask: Op | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Op:
    """(..., T, D), (..., S, D), (..., S, Dv) -> (..., T, Dv): the axes before the last two broadcast, and become the
    batch and the heads of the builder's attention."""
    if dropout_p:
        raise LoweringError("scaled_dot_product_attention: no dropout in a compiled forward; call module.eval() first")
    batch = ctx.broadcast_dims(*(x.shape.dimensions[:-2] for x in (query, key, value)) if not enable_gqa else ())
    if enable_gqa:
        batch = query.shape.dimensions[:-2]
        heads = key.shape.dimensions[-3]
    else:
        heads = batch[-1] if batch else 1
    outer, count = batch[:-1], batch[-1] if batch else 1

    def four(x: Op, heads: int) -> Op:
        spread = ctx.expand(x, (*outer, *((heads,) if batch else ()), *x.shape.dimensions[-2:]))
        return ctx.reshape(spread, (torch.Size(outer).numel(), heads, *x.shape.dimensions[-2:]))

    mask = attn_mask
    if mask is not None:
        if mask.shape.dtype is not DType.BOOL:
            mask = ctx.cast(mask, query.shape.dtype)
        length, keys = query.shape.dimensions[-2], key.shape.dimensions[-2]
        if len(outer) != 1:
            mask = ctx.expand(mask, (*batch, length, keys))
            mask = ctx.reshape(mask, (torch.Size(outer).numel(), count, length, keys))
    result = ctx.builder.scaled_dot_product_attention(
        four(query, count), four(key, heads), four(value, heads), mask, is_causal=is_causal, scale=scale
    )
    return ctx.reshape(result, (*batch, *result.shape.dimensions[-2:]))
