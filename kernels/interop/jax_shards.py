"""jax functions mapped over the shards of their arrays, where a mesh shards batch and heads (spmd.py).

A layout names an array's dimensions: "b" for batch, "h" for heads, "." for one that stays whole, as "b.h." for
(batch, sequence, heads, head_dim).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array, lax
from jax.sharding import AbstractMesh, PartitionSpec

from easytorch.kernels.interop.spmd import Shards


def over_shards(function: Callable[..., Any], shards: Shards, given: Any, layouts: Any, results: Any) -> Any:
    """`function(*given)` with each device computing its own shards.

    layouts, results: a layout for each array of `given` and of the results, as pytrees; None for None.
    """
    sizes = tuple(size for _, size in shards.axes)
    mesh = AbstractMesh(sizes, tuple(name for name, _ in shards.axes))
    inputs, outputs = (jax.tree.map(lambda layout: _spec(shards, layout), found) for found in (layouts, results))
    return jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)(*given)


def broadcast_layout(shape: Sequence[int], layout: str) -> str:
    """The layout of an array that broadcasts to one of `layout`: dimensions of length 1 are not sharded."""
    own = layout[len(layout) - len(shape) :]
    return "".join("." if length == 1 else letter for length, letter in zip(shape, own, strict=True))


def summed_over(shards: Shards, array: Array, layout: str) -> Array:
    """Inside of `function`: a gradient summed over the shards among which its array, of `layout`, is not divided."""
    names = [*(() if "b" in layout else shards.batch), *(() if "h" in layout else shards.heads)]
    return lax.psum(array, names) if names else array


def place_among(shards: Shards) -> Array:
    """Inside of `function`: int32, the number of this device's shard."""
    names = (*shards.batch, *shards.heads)
    return lax.axis_index(names) if names else jax.numpy.int32(0)


def _spec(shards: Shards, layout: str) -> PartitionSpec:
    axes = {"b": shards.batch or None, "h": shards.heads or None, ".": None}
    return PartitionSpec(*(axes[letter] for letter in layout))
