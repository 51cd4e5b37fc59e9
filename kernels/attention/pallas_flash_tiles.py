"""Shared code of the Pallas flash kernels: the dimensions of their grids, the band of visible tiles, a tile of scores.

Every tile is transposed, keys by queries (C, R): a query's maximum, sum and logsumexp are then rows (1, R) of one
vector register each, reductions run down sublanes, and no matrix is transposed inside a kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from easytorch.kernels.attention.call import TENSORS, unflatten
from easytorch.kernels.attention.jax_call import AttentionCall
from easytorch.kernels.random.constants import COLUMN, HEAD, MIX, ROW

# jax 0.7 to today; before, the class was called TPUCompilerParams
CompilerParams = pltpu.CompilerParams


class Grid(NamedTuple):
    """The dimensions of a call: `rows` x `columns` tiles over `length` queries and `keys` keys, padded to tiles."""

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

    @property
    def shift(self) -> int:
        """The key aligned with query 0."""
        return self.keys - self.length


def numbers_of(call: AttentionCall) -> AttentionCall:
    """The call without its tensors, which a kernel receives as references."""
    return unflatten((*(None,) * TENSORS, *call.numbers))


def given_of(call: AttentionCall, *, backward: bool = False) -> list[str]:
    """The names of the tensors of the call; for backward without the sinks, which the logsumexp includes."""
    names = [name for name, x in zip(AttentionCall._fields[:TENSORS], call, strict=False) if x is not None]
    return [name for name in names if not (backward and name == "sinks")]


def quotient(index: Any, size: int) -> Any:
    """index // size for an index that is not negative.

    jnp's `//` uses `sign`, and to lower that Pallas queries the attached TPU, of which there may be none.
    """
    return lax.div(index, jnp.int32(size))


def column_range(n: Grid, call: AttentionCall, i: Any) -> tuple[Any, Any]:
    """The column tiles [first, last) that the band lets any query of row tile `i` see."""
    own = i * n.rows + n.shift
    first = 0 if call.left is None else quotient(jnp.clip(own - call.left, 0, n.keys), n.columns)
    if call.right is None:
        return first, n.column_tiles
    last = jnp.clip(own + n.rows + call.right, 0, n.keys)
    return first, quotient(last + n.columns - 1, n.columns)


def row_range(n: Grid, call: AttentionCall, j: Any) -> tuple[Any, Any]:
    """The row tiles [first, last) of which any query sees a key of column tile `j`."""
    own = j * n.columns - n.shift
    first = 0 if call.right is None else quotient(jnp.clip(own - call.right, 0, n.length), n.rows)
    if call.left is None:
        return first, n.row_tiles
    last = jnp.clip(own + n.columns + call.left, 0, n.length)
    return first, quotient(last + n.rows - 1, n.rows)


def within(index: Any, bounds: tuple[Any, Any], tiles: int) -> Any:
    """`index` clamped to [first, last): a skipped tile requests the block already loaded, so nothing is fetched."""
    first, last = bounds
    return jnp.clip(jnp.clip(index, first, jnp.maximum(last - 1, first)), 0, tiles - 1)


def is_cut(n: Grid, call: AttentionCall, i: Any, j: Any) -> Any:
    """True where the band or the end of the keys leaves out a part of tile (i, j)."""
    top, first = i * n.rows + n.shift, j * n.columns
    bottom, last = top + n.rows - 1, first + n.columns - 1
    cut = jnp.bool_(False)
    if call.left is not None:
        cut |= first < bottom - call.left
    if call.right is not None:
        cut |= last > top + call.right
    if n.keys % n.columns:
        cut |= last >= n.keys
    return cut


def scores(n: Grid, call: AttentionCall, query: Array, key: Array, i: Any, j: Any, cut: bool) -> tuple[Array, Array]:
    """query (R, D), key (C, D) -> scores (C, R) float32, -inf where unseen, and the same before bias and masks."""
    capped = matmul(key, query, transposed=True) * call.scale
    if call.softcap is not None:
        capped = call.softcap * jnp.tanh(capped / call.softcap)
    result = capped
    if call.bias is not None:
        result = result + call.bias[0, 0].astype(jnp.float32)
    seen = _seen(n, call, i, j, cut)
    return result if seen is None else jnp.where(seen, result, -jnp.inf), capped


def _seen(n: Grid, call: AttentionCall, i: Any, j: Any, cut: bool) -> Array | None:
    parts = []
    if cut:
        columns = j * n.columns + lax.broadcasted_iota(jnp.int32, (n.columns, n.rows), 0)
        offset = columns - (i * n.rows + n.shift) - lax.broadcasted_iota(jnp.int32, (n.columns, n.rows), 1)
        if n.keys % n.columns:
            parts.append(columns < n.keys)
        if call.left is not None:
            parts.append(offset >= -call.left)
        if call.right is not None:
            parts.append(offset <= call.right)
    if call.mask is not None:
        parts.append(call.mask[0, 0].astype(jnp.int32) != 0)
    if call.query_segment_ids is not None and call.key_segment_ids is not None:
        parts.append(call.key_segment_ids[0] == call.query_segment_ids[0])
    seen = None
    for part in parts:
        part = jnp.broadcast_to(part, (n.columns, n.rows))
        seen = part if seen is None else seen & part
    return seen


def keep_factor(n: Grid, call: AttentionCall, head: Any, i: Any, j: Any) -> Array:
    """(C, R): 1 / (1 - dropout_prob) where the weight is kept, else 0; the hash of dropout.py.

    head: b * H + h. The hash's arithmetic is that of uint32, whose bits int32 has too; only the comparison differs.
    """
    row = i * n.rows + lax.broadcasted_iota(jnp.int32, (n.columns, n.rows), 1)
    column = j * n.columns + lax.broadcasted_iota(jnp.int32, (n.columns, n.rows), 0)
    assert call.seed is not None, "dropout has a seed"
    state = _mix(call.seed[0] ^ (head * _signed(HEAD)))
    state = _mix(state ^ (row * _signed(ROW)))
    state = _mix(state ^ (column * _signed(COLUMN)))
    flip = jnp.int32(-(2**31))
    threshold = _signed(int(call.dropout_prob * 2**32) ^ 2**31)
    return jnp.where((state ^ flip) >= threshold, 1.0 / (1.0 - call.dropout_prob), 0.0)


def _mix(x: Any) -> Any:
    x = (x ^ lax.shift_right_logical(x, 16)) * _signed(MIX[0])
    x = (x ^ lax.shift_right_logical(x, 15)) * _signed(MIX[1])
    return x ^ lax.shift_right_logical(x, 16)


def _signed(bits: int) -> Array:
    return jnp.int32(bits - 2**32 if bits >= 2**31 else bits)


def matmul(a: Array, b: Array, *, transposed: bool = False) -> Array:
    """a @ b, or a @ b^T, accumulated in float32; float32 operands are multiplied as float32, not as bfloat16."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    dimensions = (((1,), (1 if transposed else 0,)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def tile(array: Any, rows: int, columns: int, place: Any) -> Any:
    """The BlockSpec of a (Bx, Hx, Sx, Tx) array's (C, R) tile; place(*grid) -> (batch, head, column tile, row tile)."""
    full = [size != 1 for size in array.shape]
    shape = (1, 1, columns if full[2] else 1, rows if full[3] else 1)
    return pl.BlockSpec(shape, lambda *grid: tuple(p if f else 0 for p, f in zip(place(*grid), full, strict=True)))


def scalars() -> Any:
    """The BlockSpec of a small vector, whole in scalar memory."""
    return pl.BlockSpec(memory_space=pltpu.SMEM)
