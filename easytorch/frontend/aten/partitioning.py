"""Where a computation is divided over a mesh, and what a compiler must not merge (partition_ops.py)."""

from __future__ import annotations

import torch

from easytorch.backends.graph import Op
from easytorch.frontend import partition_ops
from easytorch.frontend.context import Context
from easytorch.frontend.registry import lowering


@lowering(torch.ops.easytorch_frontend.with_sharding.default)
def with_sharding(ctx: Context, x: Op, sharding: str, both_ways: bool = False) -> Op:
    """x, divided so; of a computation on one device x itself."""
    if ctx.builder.graph.mesh is None:
        return x
    return ctx.builder.with_sharding(x, partition_ops.parse(sharding, x.shape.rank))


@lowering(torch.ops.easytorch_frontend.barrier.default)
def barrier(ctx: Context, xs: list[Op]) -> tuple[Op, ...]:
    """The values as they are."""
    return ctx.builder.barrier(*xs)
