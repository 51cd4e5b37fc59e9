"""Which axes of a torch_xla mesh shard the batch and the heads of a kernel's arrays.

Under SPMD one program computes for all devices of a mesh, and XLA's partitioner divides every operation that it knows.
A Pallas kernel it does not: each device would gather the arrays and compute all of them. So a kernel's function is
mapped over the shards by jax's `shard_map` (jax_shards.py), whose manual sharding passes into torch_xla's graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

BATCH_AXES = ("dp", "fsdp", "ep", "data", "batch")
HEAD_AXES = ("tp", "mp", "model", "tensor")


class Shards(NamedTuple):
    """axes: name and size of each axis of the mesh, whose devices are in order. batch, heads: those that shard each."""

    axes: tuple[tuple[str, int], ...]
    batch: tuple[str, ...]
    heads: tuple[str, ...]


def shards_of(batch: int, *heads: int) -> Shards | None:
    """The axes of torch_xla's global mesh that divide these lengths; None without SPMD or a mesh.

    heads: of each array that has them, which are sharded alike.
    """
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    mesh = xs.get_global_mesh() if xr.is_spmd() else None
    if mesh is None or mesh.axis_names is None:
        return None
    axes = dict(zip(mesh.axis_names, map(int, mesh.mesh_shape), strict=True))
    return Shards(tuple(axes.items()), dividing(axes, BATCH_AXES, batch), dividing(axes, HEAD_AXES, *heads))


def dividing(axes: Mapping[str, int], names: tuple[str, ...], *lengths: int) -> tuple[str, ...]:
    """The axes called as in `names`, in the mesh's order, over whose devices each of the lengths divides evenly."""
    found: list[str] = []
    parts = 1
    for name, size in axes.items():
        if name in names and lengths and all(length % (parts * size) == 0 for length in lengths):
            found.append(name)
            parts *= size
    return tuple(found)
