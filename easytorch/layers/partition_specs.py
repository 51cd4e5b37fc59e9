"""Partition specs of matmuls."""

from __future__ import annotations

from torch import Tensor

from easytorch.distributed.specs import Axes, PartitionSpec, axis_names, entry, get_sharding, without_axes
from easytorch.layers.tensor_parallel import MatrixMultiplyMethod


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
        without_axes(specs[0], [axis_name]),
        specs[1] if method is MatrixMultiplyMethod.ALL_GATHER else without_axes(specs[1], [axis_name]),
    )
    if method is MatrixMultiplyMethod.REDUCE_SCATTER:
        if not tokens:
            raise ValueError("a reduce-scatter product needs tokens to scatter: lhs must be (..., tokens, features)")
        tokens[-1] = entry([*axis_names(tokens[-1]), axis_name])
    return (*tokens, features)


def get_matmul_output_sharding(lhs_pspec: PartitionSpec | None, rhs_pspec: PartitionSpec | None) -> PartitionSpec:
    """The spec of X @ W: that of X with W's last entry in place of its own. () where one of the specs is None.

    An axis shards one dimension only: the first that names it keeps it.
    """
    if lhs_pspec is None or rhs_pspec is None:
        return ()
    seen: set[str] = set()
    output: list[Axes] = []
    for axes in (*lhs_pspec[:-1], *(rhs_pspec[-1:] or (None,))):
        kept = [name for name in axis_names(axes) if name not in seen]
        seen.update(kept)
        output.append(tuple(kept) if kept and isinstance(axes, tuple) else entry(kept))
    return tuple(output)
