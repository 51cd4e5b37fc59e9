"""Partition specs, one mesh axis name, tuple of names or None a dimension, of tensors and of their products."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from easytorch.layers.tensor_parallel import MatrixMultiplyMethod

Axes = str | tuple[str, ...] | None
PartitionSpec = tuple[Axes, ...]


def get_sharding(arr: Tensor) -> PartitionSpec | None:
    """The spec of a DTensor, one entry a dimension; None for any other tensor.

    An axis without a name is `dim_<i>`. Placements other than Shard (replicated, partial) name no dimension.
    """
    if not isinstance(arr, DTensor):
        return None
    mesh = arr.device_mesh
    names = mesh.mesh_dim_names or tuple(f"dim_{index}" for index in range(mesh.ndim))
    axes: list[list[str]] = [[] for _ in range(arr.ndim)]
    for name, placement in zip(names, arr.placements, strict=True):
        if isinstance(placement, Shard):
            axes[placement.dim].append(name)
    return tuple(_entry(one) for one in axes)


def get_output_partition_spec(
    lhs: Tensor, rhs: Tensor, method: MatrixMultiplyMethod | str, axis_name: str
) -> PartitionSpec | None:
    """The spec of lhs (..., K) @ rhs (K, N) by `method` over the axis; None where one of them is not sharded.

    ALL_GATHER leaves the output's features sharded as rhs has them, and its tokens gathered. REDUCE_SCATTER leaves its
    tokens, dimension -2, sharded over the axis. Other axes stay as the two have them.
    """
    specs = get_sharding(lhs), get_sharding(rhs)
    if specs[0] is None or specs[1] is None:
        return None
    method = MatrixMultiplyMethod(method)
    *tokens, features = get_matmul_output_sharding(
        tuple(_without(axes, axis_name) for axes in specs[0]),
        specs[1] if method is MatrixMultiplyMethod.ALL_GATHER else tuple(_without(one, axis_name) for one in specs[1]),
    )
    if method is MatrixMultiplyMethod.REDUCE_SCATTER:
        if not tokens:
            raise ValueError("a reduce-scatter product needs tokens to scatter: lhs must be (..., tokens, features)")
        tokens[-1] = _entry([*_names(tokens[-1]), axis_name])
    return (*tokens, features)


def get_matmul_output_sharding(lhs_pspec: PartitionSpec | None, rhs_pspec: PartitionSpec | None) -> PartitionSpec:
    """The spec of X @ W from theirs: X's but for its last entry, and W's last. () where one of them is None.

    An axis shards one dimension only: the first that names it keeps it.
    """
    if lhs_pspec is None or rhs_pspec is None:
        return ()
    seen: set[str] = set()
    output: list[Axes] = []
    for axes in (*lhs_pspec[:-1], *(rhs_pspec[-1:] or (None,))):
        kept = [name for name in _names(axes) if name not in seen]
        seen.update(kept)
        output.append(tuple(kept) if kept and isinstance(axes, tuple) else _entry(kept))
    return tuple(output)


def _names(axes: Axes) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else axes or ()


def _without(axes: Axes, axis_name: str) -> Axes:
    return _entry(name for name in _names(axes) if name != axis_name)


def _entry(names: Iterable[str]) -> Axes:
    found = tuple(names)
    return found[0] if len(found) == 1 else found or None
