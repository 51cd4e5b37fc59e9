"""jax_shard_map.py inside a torch_xla graph under SPMD: one node forward, one backward, partitioned with the rest.

The tensors are whole sequences, sharded over an axis of a torch_xla mesh; jax's manual sharding and its sends pass
through the bridge as they are.
"""

from __future__ import annotations

from typing import Any

from jax.sharding import AbstractMesh
from torch import Tensor

from easytorch.kernels.attention.contract import resolve
from easytorch.kernels.attention.torch_xla_call import call_jax_on_with_gradient
from easytorch.kernels.interop.spmd import BATCH_AXES, HEAD_AXES, dividing
from easytorch.kernels.ring.jax_shard_map import Ring, ring_backward, ring_forward


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    axes: dict[str, int],
    axis: str,
    layout: str = "contiguous",
    **features: Any,
) -> Tensor:
    """(B, T, H, D), (B, S, K, D), (B, S, K, Dv) -> (B, T, H, Dv), in the query's dtype, computed in float32.

    axes: name -> size of the mesh, whose devices are in order. axis: the one that shards T and S; the axes called as in
    `BATCH_AXES` and `HEAD_AXES` that divide them shard batch and heads. Segment ids follow the tokens as stored.
    """
    call = resolve(query, key, value, **features)
    batch, _, heads, _ = query.shape
    ring = Ring(
        AbstractMesh(tuple(axes.values()), tuple(axes)), axis, layout,
        dividing(axes, BATCH_AXES, batch), dividing(axes, HEAD_AXES, heads, key.shape[2]),
    )  # fmt: skip
    return call_jax_on_with_gradient(ring_forward, ring_backward, call, query, key, value, ring=ring)
