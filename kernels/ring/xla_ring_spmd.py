"""xla_ring.py inside a torch_xla graph under SPMD: one node forward, one backward, partitioned with the rest.

The tensors are whole sequences, sharded over an axis of a torch_xla mesh; jax's manual sharding and its sends pass
through the bridge as they are, as long as they are GSPMD's: torch_xla 2.9 does not read Shardy's.
"""

from __future__ import annotations

from typing import Any

import jax
import torch
from jax.sharding import AbstractMesh
from torch import Tensor

from easytorch.kernels.attention.contract import band_of, check_features, check_tensors
from easytorch.kernels.interop.xla_bridge import call_jax_with_gradient
from easytorch.kernels.ring.xla_ring import Ring, Settings, ring_backward, ring_forward

_config: Any = jax.config
_config.update("jax_use_shardy_partitioner", False)  # jax only traces in this process

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
    causal: bool = False,
    query_segment_ids: Tensor | None = None,
    key_segment_ids: Tensor | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    softmax_scale: float | None = None,
) -> Tensor:
    """(B, T, H, D), (B, S, K, D), (B, S, K, Dv) -> (B, T, H, Dv), in the query's dtype, computed in float32.

    axes: name -> size of the mesh, whose devices are in order. axis: the one that shards T and S; an axis called as in
    `BATCH_AXES` or `HEAD_AXES` that divides them shards batch or heads. Segment ids follow the tokens as stored.
    """
    batch, _, _, heads, kv_heads, dim, _ = check_tensors(query, key, value)
    check_features(
        query, key, query_segment_ids=query_segment_ids, key_segment_ids=key_segment_ids, softcap=softcap, sinks=sinks
    )
    left, right = band_of(causal, sliding_window)
    ring = Ring(
        AbstractMesh(tuple(axes.values()), tuple(axes)), axis, layout,
        _dividing(axes, BATCH_AXES, batch), _dividing(axes, HEAD_AXES, heads, kv_heads),
    )  # fmt: skip
    settings = Settings(
        dim**-0.5 if softmax_scale is None else float(softmax_scale), left, right,
        None if softcap is None else float(softcap),
    )  # fmt: skip
    ids = [None if x is None else x.to(torch.int32) for x in (query_segment_ids, key_segment_ids)]
    return call_jax_with_gradient(
        ring_forward, ring_backward, query, key, value, *ids, sinks, ring=ring, settings=settings
    )


def _dividing(axes: dict[str, int], names: tuple[str, ...], *lengths: int) -> str | None:
    found = (name for name in names if name in axes and all(length % axes[name] == 0 for length in lengths))
    return next(found, None)
