"""One tile of scores in jax, shared by the forward and backward of jax_flash.py.

A tile is (G, R, C): the G query heads of one key/value head, R query rows, C key columns.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from easytorch.kernels.attention.jax_call import AttentionCall
from easytorch.kernels.random.constants import COLUMN, HEAD, MIX, ROW

# Rows and columns of a tile: 128 x 128 was the fastest of 64..512 x 64..512 (EPYC, AVX-512, 2 cores, D 64 and 128).
TILE_ROWS, TILE_COLUMNS = 128, 128


class TileGrid(NamedTuple):
    """The dimensions of a call, and the `rows` x `columns` tiles that cover its (length, keys) scores."""

    batch: int
    length: int
    keys: int
    kv_heads: int
    group: int
    rows: int
    columns: int

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def row_tiles(self) -> int:
        return -(-self.length // self.rows)

    @property
    def column_tiles(self) -> int:
        return -(-self.keys // self.columns)


def tile_grid(query: Array, key: Array) -> TileGrid:
    batch, length, heads, _ = query.shape
    keys, kv_heads = key.shape[1:3]
    group = heads // kv_heads
    # the group is folded into rows: fewer positions keep the tile the same size
    rows = min(max(TILE_ROWS // group, 16), length)
    return TileGrid(batch, length, keys, kv_heads, group, rows, min(TILE_COLUMNS, keys))


def pad(array: Array, axis: int, multiple: int, fill: float = 0) -> Array:
    """`fill` after the end of `axis`, up to a multiple."""
    missing = -array.shape[axis] % multiple
    if missing == 0:
        return array
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, missing)
    return jnp.pad(array, widths, constant_values=fill)


def padded_to_tiles(n: TileGrid, call: AttentionCall) -> AttentionCall:
    """The call with mask and bias (Bx, Hx, Tx, Sx), 1 where they broadcast, and the segment ids padded to tiles."""
    query_ids, key_ids = call.query_segment_ids, call.key_segment_ids
    return call._replace(
        mask=None if call.mask is None else _pad_matrix(n, call.mask),
        bias=None if call.bias is None else _pad_matrix(n, call.bias),
        query_segment_ids=None if query_ids is None else pad(query_ids, 1, n.rows),
        key_segment_ids=None if key_ids is None else pad(key_ids, 1, n.columns),
        seed=None if call.seed is None else call.seed.astype(jnp.uint32),
    )


def _pad_matrix(n: TileGrid, matrix: Array) -> Array:
    matrix = matrix.reshape((1,) * (4 - matrix.ndim) + matrix.shape)
    if matrix.shape[2] != 1:
        matrix = pad(matrix, 2, n.rows)
    return pad(matrix, 3, n.columns) if matrix.shape[3] != 1 else matrix


def query_heads(n: TileGrid, x: Array) -> Array:
    """(B, T, H, N) -> float32 (B * K, G, T padded, N)."""
    x = pad(x.astype(jnp.float32), 1, n.rows).reshape(n.batch, -1, n.kv_heads, n.group, x.shape[-1])
    return x.transpose(0, 2, 3, 1, 4).reshape(n.batch * n.kv_heads, n.group, -1, x.shape[-1])


def from_query_heads(n: TileGrid, x: Array) -> Array:
    """The inverse of `query_heads`, in float32."""
    x = x.reshape(n.batch, n.kv_heads, n.group, -1, x.shape[-1]).transpose(0, 3, 1, 2, 4)
    return x.reshape(n.batch, -1, n.heads, x.shape[-1])[:, : n.length]


def key_heads(n: TileGrid, x: Array) -> Array:
    """(B, S, K, N) -> float32 (B * K, S padded, N)."""
    x = pad(x.astype(jnp.float32), 1, n.columns).transpose(0, 2, 1, 3)
    return x.reshape(n.batch * n.kv_heads, -1, x.shape[-1])


def from_key_heads(n: TileGrid, x: Array) -> Array:
    """The inverse of `key_heads`, in float32."""
    return x.reshape(n.batch, n.kv_heads, -1, x.shape[-1]).transpose(0, 2, 1, 3)[:, : n.keys]


def column_range(n: TileGrid, call: AttentionCall, row_tile: Array) -> tuple[Array, Array]:
    """The column tiles [first, last) that the band lets any row of `row_tile` see."""
    own = row_tile * n.rows + (n.keys - n.length)  # the key aligned with the first row
    first, last = jnp.int32(0), jnp.int32(n.keys)
    if call.left is not None:
        first = jnp.clip(own - call.left, 0, n.keys)
    if call.right is not None:
        last = jnp.clip(own + n.rows + call.right, 0, n.keys)
    return first // n.columns, (last + n.columns - 1) // n.columns


def row_range(n: TileGrid, call: AttentionCall, column_tile: Array) -> tuple[Array, Array]:
    """The row tiles [first, last) of which any row sees a column of `column_tile`."""
    own = column_tile * n.columns - (n.keys - n.length)  # the row aligned with the first column
    first, last = jnp.int32(0), jnp.int32(n.length)
    if call.right is not None:
        first = jnp.clip(own - call.right, 0, n.length)
    if call.left is not None:
        last = jnp.clip(own + n.columns + call.left, 0, n.length)
    return first // n.rows, (last + n.rows - 1) // n.rows


def matmul(a: Array, b: Array, contract: tuple[int, int], precision: lax.Precision) -> Array:
    """`a` and `b` matrices contracted over one dimension each; a (G, R, N) operand counts as (G * R, N)."""
    return lax.dot_general(a, b, (((contract[0],), (contract[1],)), ((), ())), precision=precision)


def tile_start(
    n: TileGrid, matrix: Array, head: Array, i: Array, j: Array
) -> tuple[tuple[Array, ...], tuple[int, ...]]:
    """Start indices and sizes in a (Bx, Hx, Tx, Sx) matrix of the tile (i, j) of key/value head `head`."""
    place = (head // n.kv_heads, head % n.kv_heads * n.group, i * n.rows, j * n.columns)
    size = (1, n.group, n.rows, n.columns)
    full = [extent != 1 for extent in matrix.shape]
    zero = jnp.zeros_like(head)
    return (
        tuple(p if f else zero for p, f in zip(place, full, strict=True)),
        tuple(s if f else 1 for s, f in zip(size, full, strict=True)),
    )


def take_tile(n: TileGrid, matrix: Array, head: Array, i: Array, j: Array) -> Array:
    """The tile (i, j) of a matrix that broadcasts to (B, H, T, S): broadcasts to (G, R, C)."""
    start, size = tile_start(n, matrix, head, i, j)
    return lax.dynamic_slice(matrix, start, size)[0]


def scores(
    n: TileGrid,
    call: AttentionCall,
    query: Array,
    key: Array,
    head: Array,
    i: Array,
    j: Array,
    precision: lax.Precision,
) -> tuple[Array, Array]:
    """query (G, R, D), key (C, D) -> scores (G, R, C), -inf where unseen, and the same before bias and masks."""
    flat = matmul(query.reshape(-1, query.shape[-1]), key, (1, 1), precision) * call.scale
    capped = flat.reshape(n.group, n.rows, n.columns)
    if call.softcap is not None:
        capped = call.softcap * jnp.tanh(capped / call.softcap)
    result = capped
    if call.bias is not None:
        result = result + take_tile(n, call.bias, head, i, j).astype(jnp.float32)
    seen = _seen(n, call, head, i, j)
    return result if seen is None else jnp.where(seen, result, -jnp.inf), capped


def _seen(n: TileGrid, call: AttentionCall, head: Array, i: Array, j: Array) -> Array | None:
    columns = j * n.columns + lax.broadcasted_iota(jnp.int32, (n.rows, n.columns), 1)
    offset = columns - lax.broadcasted_iota(jnp.int32, (n.rows, n.columns), 0) - (i * n.rows + n.keys - n.length)
    parts = []
    if n.keys % n.columns:
        parts.append(columns < n.keys)
    if call.left is not None:
        parts.append(offset >= -call.left)
    if call.right is not None:
        parts.append(offset <= call.right)
    if call.mask is not None:
        parts.append(take_tile(n, call.mask, head, i, j))
    if call.query_segment_ids is not None and call.key_segment_ids is not None:
        batch = head // n.kv_heads
        rows = lax.dynamic_slice(call.query_segment_ids, (batch, i * n.rows), (1, n.rows))
        keys = lax.dynamic_slice(call.key_segment_ids, (batch, j * n.columns), (1, n.columns))
        parts.append(rows.reshape(n.rows, 1) == keys)
    seen = None
    for part in parts:
        seen = part if seen is None else seen & part
    return seen


def keep_factor(n: TileGrid, call: AttentionCall, head: Array, i: Array, j: Array) -> Array:
    """(G, R, C): 1 / (1 - dropout_prob) where the weight is kept, else 0; the hash of dropout.py in uint32."""
    # b * H + h of each query head of the group: heads of one batch are consecutive
    index = head * n.group + lax.broadcasted_iota(jnp.int32, (n.group, 1, 1), 0)
    row = i * n.rows + lax.broadcasted_iota(jnp.int32, (1, n.rows, 1), 1)
    column = j * n.columns + lax.broadcasted_iota(jnp.int32, (1, 1, n.columns), 2)
    state = _mix(call.seed ^ (index.astype(jnp.uint32) * jnp.uint32(HEAD)))
    state = _mix(state ^ (row.astype(jnp.uint32) * jnp.uint32(ROW)))
    state = _mix(state ^ (column.astype(jnp.uint32) * jnp.uint32(COLUMN)))
    kept = state >= jnp.uint32(int(call.dropout_prob * 2**32))
    return jnp.where(kept, 1.0 / (1.0 - call.dropout_prob), 0.0).astype(jnp.float32)


def _mix(x: Array) -> Array:
    x = (x ^ (x >> 16)) * jnp.uint32(MIX[0])
    x = (x ^ (x >> 15)) * jnp.uint32(MIX[1])
    return x ^ (x >> 16)
