"""Rows of a table."""

from __future__ import annotations

import torch

from easytorch.backends.graph import Op
from easytorch.frontend.context import Context
from easytorch.frontend.registry import lowering

aten = torch.ops.aten


@lowering(aten.embedding.default)
def embedding(
    ctx: Context, weight: Op, indices: Op, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Op:
    """(V, D), (...) -> (..., D). Indices outside of the table are clamped: a compiled program cannot stop."""
    rank = indices.shape.rank
    return ctx.builder.gather(
        weight,
        ctx.reshape(indices, (*indices.shape.dimensions, 1)),
        index_vector_axis=rank,
        offset_output_axes=(rank,),
        collapsed_slice_axes=(0,),
        start_index_map=(0,),
        slice_sizes=(1, weight.shape.dimensions[1]),
    )
