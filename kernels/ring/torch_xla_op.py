"""jax_shard_map.py inside a torch_xla graph under SPMD: one node forward, one backward, partitioned with the rest.

The tensors are whole sequences, sharded over an axis of a torch_xla mesh; jax's manual sharding and its sends pass
through the bridge as they are, as long as they are GSPMD's: torch_xla 2.9 does not read Shardy's.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AbstractMesh
from torch import Tensor

from easytorch.kernels.attention.contract import resolve
from easytorch.kernels.attention.torch_xla_call import call_jax_on_with_gradient
from easytorch.kernels.ring.jax_shard_map import Ring, ring_backward, ring_forward

_config: Any = jax.config
_config.update("jax_use_shardy_partitioner", False)  # jax only traces here

BATCH_AXES = ("dp", "fsdp", "data", "batch")
HEAD_AXES = ("tp", "mp", "model", "tensor")


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

    axes: name -> size of the mesh, whose devices are in order. axis: the one that shards T and S; an axis called as in
    `BATCH_AXES` or `HEAD_AXES` that divides them shards batch or heads. Segment ids follow the tokens as stored.
    """
    call = resolve(query, key, value, **features)
    batch, _, heads, _ = query.shape
    ring = Ring(
        AbstractMesh(tuple(axes.values()), tuple(axes)), axis, layout,
        _dividing(axes, BATCH_AXES, batch), _dividing(axes, HEAD_AXES, heads, key.shape[2]),
    )  # fmt: skip
    return call_jax_on_with_gradient(ring_forward, ring_backward, call, query, key, value, ring=ring)


def _dividing(axes: dict[str, int], names: tuple[str, ...], *lengths: int) -> str | None:
    found = (name for name in names if name in axes and all(length % axes[name] == 0 for length in lengths))
    return next(found, None)
