"""The arguments of a flash call in the layout that the Pallas kernels read: heads first, padded to whole tiles."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from easytorch.kernels.attention.jax_call import AttentionCall
from easytorch.kernels.attention.jax_flash_tiles import pad
from easytorch.kernels.attention.pallas_flash_tiles import Grid
from easytorch.kernels.attention.pallas_tuning import BlockSizes

LANES = 128


def grid_of(query: Array, key: Array, blocks: BlockSizes) -> Grid:
    """Sizes of the call; a tile is never longer than the padded sequence, and its sides are whole vector registers."""
    batch, length, heads, _ = query.shape
    keys, kv_heads = key.shape[1:3]
    rows = min(blocks.rows, -(-length // LANES) * LANES)
    columns = min(blocks.columns, -(-keys // LANES) * LANES)
    return Grid(batch, length, keys, kv_heads, heads // kv_heads, rows, columns)


def heads_first(x: Array, multiple: int) -> Array:
    """(B, T, H, N) -> (B, H, T padded, N)."""
    return pad(x.transpose(0, 2, 1, 3), 2, multiple)


def heads_first_transposed(x: Array, multiple: int) -> Array:
    """(B, T, H, N) -> (B, H, N, T padded)."""
    return pad(x.transpose(0, 2, 3, 1), 3, multiple)


def rows_of(n: Grid, x: Array, fill: float) -> Array:
    """(B, H, T) -> (B, H, 1, T padded)."""
    return pad(x[:, :, None], 3, n.rows, fill)


def logsumexp_rows(n: Grid, logsumexp: Array) -> Array:
    """(B, H, 2, T) -> (B, H, 2, T padded), where a padded row sees nothing."""
    return jnp.concatenate((rows_of(n, logsumexp[:, :, 0], 0.0), rows_of(n, logsumexp[:, :, 1], jnp.inf)), 2)


def padded_to_tiles(n: Grid, call: AttentionCall) -> AttentionCall:
    """The call's tensors as the kernels read them.

    mask int8 and bias (Bx, Hx, Sx, Tx), 1 where they broadcast; query ids (B, 1, T) and key ids (B, S, 1) int32; sinks
    float32 (H,) and seed int32 (1,), for scalar memory.
    """
    query_ids, key_ids = call.query_segment_ids, call.key_segment_ids
    return call._replace(
        # bool has no layout in vector memory
        mask=None if call.mask is None else _matrix(n, call.mask.astype(jnp.int8)),
        bias=None if call.bias is None else _matrix(n, call.bias),
        query_segment_ids=None if query_ids is None else pad(query_ids[:, None].astype(jnp.int32), 2, n.rows),
        key_segment_ids=None if key_ids is None else pad(key_ids[..., None].astype(jnp.int32), 1, n.columns),
        sinks=None if call.sinks is None else call.sinks.astype(jnp.float32),
        seed=None if call.seed is None else call.seed.astype(jnp.int32).reshape(1),
    )


def _matrix(n: Grid, matrix: Array) -> Array:
    """(..., Tx, Sx) -> (Bx, Hx, Sx padded, Tx padded), where 1 stays 1."""
    matrix = matrix.reshape((1,) * (4 - matrix.ndim) + matrix.shape).swapaxes(2, 3)
    if matrix.shape[2] != 1:
        matrix = pad(matrix, 2, n.columns)
    return pad(matrix, 3, n.rows) if matrix.shape[3] != 1 else matrix
