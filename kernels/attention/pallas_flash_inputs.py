"""The arguments of a flash call brought to the form the Pallas kernels read: heads first, padded to whole tiles."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from easytorch.kernels.attention.pallas_flash_tiles import Extras, Grid
from easytorch.kernels.attention.pallas_tuning import Blocks
from easytorch.kernels.attention.xla_flash_tiles import pad

LANES = 128


def grid_of(query: Array, key: Array, blocks: Blocks) -> Grid:
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


def extras_of(
    n: Grid,
    mask: Array | None,
    bias: Array | None,
    query_segments: Array | None,
    key_segments: Array | None,
    sinks: Array | None,
    seed: Array | None,
) -> Extras:
    return Extras(
        # a bool has no layout of its own in the vector memory
        mask=None if mask is None else _matrix(n, mask.astype(jnp.int8)),
        bias=None if bias is None else _matrix(n, bias),
        query_segments=None if query_segments is None else pad(query_segments[:, None].astype(jnp.int32), 2, n.rows),
        key_segments=None if key_segments is None else pad(key_segments[..., None].astype(jnp.int32), 1, n.columns),
        sinks=None if sinks is None else sinks.astype(jnp.float32),
        seed=None if seed is None else seed.astype(jnp.int32).reshape(1),
    )


def _matrix(n: Grid, matrix: Array) -> Array:
    """(..., Tx, Sx) -> (Bx, Hx, Sx padded, Tx padded), where 1 stays 1."""
    matrix = matrix.reshape((1,) * (4 - matrix.ndim) + matrix.shape).swapaxes(2, 3)
    if matrix.shape[2] != 1:
        matrix = pad(matrix, 2, n.columns)
    return pad(matrix, 3, n.rows) if matrix.shape[3] != 1 else matrix
