"""How aten_flash.py splits a call into tiles, and how it computes a tile of scores.

A tile holds, for the N key/value heads of a chunk, some query positions against every key that they may see. The G
query heads that read one key/value head are folded into rows: row r is query position r // G, query head r % G.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.attention.dropout import threshold
from easytorch.kernels.random.constants import COLUMN, HEAD, MIX, ROW

# Of 64..512 query positions and 1..16 MiB, the fastest for D 64 and 128, T 1024 and 4096 (EPYC, AVX-512, 2 cores).
ROWS = 128
FEWEST_ROWS = 16
TILE_BYTES = 4 << 20
SINK_COLUMNS = 16  # the sink is a column of the tile; the others keep rows aligned


class Tiling(NamedTuple):
    """The dimensions of a call, the dtype of its products, and how many rows and heads a tile takes."""

    batch: int
    length: int
    keys: int
    kv_heads: int
    group: int
    dim: int
    value_dim: int
    dtype: torch.dtype  # of the products with values and with gradients
    rows: int  # query positions of a tile
    heads: int  # key/value heads of a tile

    @property
    def wide(self) -> torch.dtype:
        """The dtype of scores, and of the query and keys that they are products of."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def shift(self) -> int:
        """Query i is aligned with key i + shift."""
        return self.keys - self.length


class Chunk(NamedTuple):
    """Key/value heads [k0, k1) of batches [b0, b1); N of them in all."""

    b0: int
    b1: int
    k0: int
    k1: int

    @property
    def heads(self) -> int:
        return (self.b1 - self.b0) * (self.k1 - self.k0)


class Block(NamedTuple):
    """Query positions [first, last) against keys [start, stop)."""

    first: int
    last: int
    start: int
    stop: int


def tiling_of(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tiling:
    batch, length, heads, dim = query.shape
    keys, kv_heads = key.shape[1:3]
    group = heads // kv_heads
    dtype = product_dtype(query.dtype, call)
    row_bytes = max(1, group * keys * max(dtype.itemsize, torch.float32.itemsize))
    threads = torch.get_num_threads()
    rows = min(ROWS, max(FEWEST_ROWS, TILE_BYTES // (row_bytes * threads)), max(length, 1))
    # at least one head per thread: batched matmuls are parallel over heads
    chunk = min(max(TILE_BYTES // (row_bytes * rows), threads), batch * kv_heads)
    return Tiling(batch, length, keys, kv_heads, group, dim, value.shape[3], dtype, rows, chunk)


def product_dtype(dtype: torch.dtype, call: AttentionCall) -> torch.dtype:
    """The dtype of matmuls: bfloat16 stays, float16 (slow on CPUs) becomes float32.

    The scores are an exception: ATen would round them to bfloat16, and an error of 2**-9 in a score of 20 becomes one
    of 4% in its weight. With a softcap, bias, sinks or dropout all matmuls are float32.
    """
    if dtype == torch.float64:
        return dtype
    plain = call.softcap is None and call.bias is None and call.sinks is None and call.seed is None
    return dtype if dtype == torch.bfloat16 and plain else torch.float32


def chunks(n: Tiling) -> Iterator[Chunk]:
    if n.heads >= n.kv_heads:
        batches = n.heads // n.kv_heads
        for b in range(0, n.batch, batches):
            yield Chunk(b, min(b + batches, n.batch), 0, n.kv_heads)
        return
    for b in range(n.batch):
        for k in range(0, n.kv_heads, n.heads):
            yield Chunk(b, b + 1, k, min(k + n.heads, n.kv_heads))


def blocks(n: Tiling, call: AttentionCall, chunk: Chunk) -> Iterator[Block]:
    """The tiles of a chunk, without keys at either end that are hidden from all rows."""
    for first in range(0, n.length, n.rows):
        last = min(first + n.rows, n.length)
        start = 0 if call.left is None else max(0, first + n.shift - call.left)
        stop = n.keys if call.right is None else min(n.keys, last + n.shift + call.right)
        if call.query_segment_ids is not None and call.key_segment_ids is not None and start < stop:
            queries = call.query_segment_ids[chunk.b0 : chunk.b1, first:last]
            keys = call.key_segment_ids[chunk.b0 : chunk.b1, start:stop]
            start, stop = _narrowed(start, ((keys >= queries.min()) & (keys <= queries.max())).any(dim=0))
        if call.mask is not None and call.mask.shape[1] == 1 and call.mask.shape[3] != 1 and start < stop:
            seen = part(n, call.mask, chunk, Block(first, last, start, stop))
            start, stop = _narrowed(start, seen.flatten(0, -2).any(dim=0))
        if start < stop:
            yield Block(first, last, start, stop)


def _narrowed(start: int, seen: Tensor) -> tuple[int, int]:
    """The first and the one beyond the last key that is seen, of those from `start` on."""
    places = seen.nonzero()
    return (start + int(places[0]), start + int(places[-1]) + 1) if len(places) else (start, start)


def query_rows(n: Tiling, x: Tensor, chunk: Chunk, block: Block, dtype: torch.dtype) -> Tensor:
    """The rows (N, R * G, X) of a tile out of (B, T, H, X), in that dtype."""
    return _grouped(n, x, chunk, block).to(dtype).reshape(chunk.heads, -1, x.shape[-1]).contiguous()


def put_query_rows(n: Tiling, x: Tensor, chunk: Chunk, block: Block, rows: Tensor) -> None:
    """Writes the rows (N, R * G, X) of a tile into (B, T, H, X)."""
    target = _grouped(n, x, chunk, block)
    target.copy_(rows.view(target.shape))


def _grouped(n: Tiling, x: Tensor, chunk: Chunk, block: Block) -> Tensor:
    """(B, T, H, X) -> the view (batches, heads, R, G, X) of a tile."""
    x = x[chunk.b0 : chunk.b1, block.first : block.last, chunk.k0 * n.group : chunk.k1 * n.group]
    return x.unflatten(2, (-1, n.group)).transpose(1, 2)


def key_rows(n: Tiling, x: Tensor, chunk: Chunk, dtype: torch.dtype) -> Tensor:
    """The keys (N, S, X) of a chunk out of (B, S, K, X), in that dtype."""
    x = x[chunk.b0 : chunk.b1, :, chunk.k0 : chunk.k1].transpose(1, 2)
    return x.to(dtype).reshape(chunk.heads, n.keys, x.shape[-1]).contiguous()


def put_key_rows(x: Tensor, chunk: Chunk, rows: Tensor) -> None:
    """Writes the keys (N, S, X) of a chunk into (B, S, K, X)."""
    target = x[chunk.b0 : chunk.b1, :, chunk.k0 : chunk.k1].transpose(1, 2)
    target.copy_(rows.view(target.shape))


class Tile(NamedTuple):
    """The buffer of one tile of scores: `whole` (N, R * G, C + sink columns), its keys `scores` (N, R * G, C)."""

    whole: Tensor
    scores: Tensor

    def copy_(self, other: Tile) -> Tile:
        """Copies another tile, rounded to this one's dtype."""
        self.whole.copy_(other.whole)
        return self

    def split(self, n: Tiling, chunk: Chunk) -> Tensor:
        """The scores as (batches, heads, R, G, C)."""
        shape = (chunk.b1 - chunk.b0, chunk.k1 - chunk.k0, -1, n.group, self.whole.shape[-1])
        return self.whole.view(shape)[..., : self.scores.shape[-1]]


def memory(n: Tiling, call: AttentionCall, dtype: torch.dtype) -> Tensor:
    """Memory for the largest tile."""
    columns = n.keys + (0 if call.sinks is None else SINK_COLUMNS)
    return torch.empty(n.heads * n.rows * n.group * columns, dtype=dtype)


def tile_of(n: Tiling, call: AttentionCall, buffer: Tensor, chunk: Chunk, block: Block) -> Tile:
    rows, columns = (block.last - block.first) * n.group, block.stop - block.start
    width = columns + (0 if call.sinks is None else SINK_COLUMNS)
    whole = buffer[: chunk.heads * rows * width].view(chunk.heads, rows, width)
    return Tile(whole, whole[..., :columns] if width > columns else whole)


def weights(
    n: Tiling, call: AttentionCall, chunk: Chunk, block: Block, tile: Tile, query: Tensor, key: Tensor,
    capped: Tensor | None = None,
) -> None:  # fmt: skip
    """Fills a tile of the wide dtype with the softmax of scores, zeros in a row that sees nothing.

    query (N, R * G, D) and key (N, C, D) are of that dtype too. capped: memory for tanh(scores / softcap), which
    backward needs.
    """
    scores = tile.scores
    factor = call.scale if call.softcap is None else call.scale / call.softcap
    torch.baddbmm(scores, query, key.mT, beta=0, alpha=factor, out=scores)
    if call.softcap is not None:
        scores.tanh_()
        if capped is not None:
            capped.copy_(scores)
        scores.mul_(call.softcap)
    split = tile.split(n, chunk)
    if call.bias is not None:
        split.add_(part(n, call.bias, chunk, block))
    hidden = _hide(n, call, chunk, block, split)
    if call.sinks is not None:
        sinks = call.sinks.reshape(n.kv_heads, 1, n.group)[chunk.k0 : chunk.k1]
        columns = tile.whole.view(*split.shape[:-1], -1)[..., split.shape[-1] :]
        columns[..., 1:] = float("-inf")
        columns[..., 0] = sinks
    empty = None
    if hidden or call.bias is not None:
        empty = tile.whole.amax(dim=-1, keepdim=True) == float("-inf")
    torch._softmax(tile.whole, -1, False, out=tile.whole)
    if empty is not None and empty.any():
        tile.whole.masked_fill_(empty, 0.0)


def _hide(n: Tiling, call: AttentionCall, chunk: Chunk, block: Block, scores: Tensor) -> bool:
    """-inf where (batches, heads, R, G, C) is not seen; True where that may leave a row nothing.

    The band is applied only where it crosses the tile. Every row has keys in the band, but `blocks` may have removed
    them from the tile.
    """
    found = _band_misses(n, call, block)
    own = torch.arange(block.first, block.last)[:, None] + n.shift
    if call.right is not None:
        edge = max(block.start, block.first + n.shift + call.right + 1)  # the first row sees all before it
        if edge < block.stop:
            hidden = torch.arange(edge, block.stop) > own + call.right
            _hide_from_all(scores[..., edge - block.start :], hidden[:, None])
    if call.left is not None:
        edge = min(block.stop, block.last - 1 + n.shift - call.left)  # the last row sees all from here on
        if edge > block.start:
            hidden = torch.arange(block.start, edge) < own - call.left
            _hide_from_all(scores[..., : edge - block.start], hidden[:, None])
    if call.mask is not None:
        hidden = ~part(n, call.mask, chunk, block)
        if hidden.any():
            found = True
            if call.mask.shape[1] == 1:
                _hide_from_all(scores, hidden)
            else:
                scores.masked_fill_(hidden, float("-inf"))
    if call.query_segment_ids is not None and call.key_segment_ids is not None:
        queries = call.query_segment_ids[chunk.b0 : chunk.b1, block.first : block.last]
        keys = call.key_segment_ids[chunk.b0 : chunk.b1, block.start : block.stop]
        hidden = queries[:, None, :, None, None] != keys[:, None, None, None, :]
        if hidden.any():
            _hide_from_all(scores, hidden)
            found = True
    return found


def _band_misses(n: Tiling, call: AttentionCall, block: Block) -> bool:
    """Whether a row's band ends before the first key of the tile, or begins beyond the last."""
    before = call.right is not None and block.first + n.shift + call.right < block.start
    return before or (call.left is not None and block.last - 1 + n.shift - call.left >= block.stop)


def _hide_from_all(scores: Tensor, hidden: Tensor) -> None:
    """Adds -inf where `hidden`, the same for all heads, is True: 3 (bfloat16) to 7 times as fast as `masked_fill_`."""
    scores.add_(torch.zeros(hidden.shape, dtype=scores.dtype).masked_fill_(hidden, float("-inf")))


def part(n: Tiling, matrix: Tensor, chunk: Chunk, block: Block) -> Tensor:
    """The view of a (Bx, Hx, Tx, Sx) matrix that belongs to a tile: broadcasts to (batches, heads, R, G, C)."""
    if matrix.shape[0] != 1:
        matrix = matrix[chunk.b0 : chunk.b1]
    if matrix.shape[2] != 1:
        matrix = matrix[:, :, block.first : block.last]
    if matrix.shape[3] != 1:
        matrix = matrix[..., block.start : block.stop]
    if matrix.shape[1] == 1:
        return matrix.unsqueeze(3)
    matrix = matrix[:, chunk.k0 * n.group : chunk.k1 * n.group]
    return matrix.unflatten(1, (-1, n.group)).transpose(2, 3)


def keep_factor(n: Tiling, call: AttentionCall, chunk: Chunk, block: Block) -> Tensor:
    """(N, R * G, C): 1 / (1 - dropout_prob) where the weight is kept, else 0; the hash of dropout.py in int32."""
    batches = torch.arange(chunk.b0, chunk.b1)[:, None, None, None, None] * (n.kv_heads * n.group)
    heads = torch.arange(chunk.k0, chunk.k1)[:, None, None, None] * n.group + torch.arange(n.group)[:, None]
    assert call.seed is not None, "dropout has a seed"
    state = _mix(_low(call.seed) ^ _low((batches + heads) * HEAD))
    state = _mix(state ^ _low(torch.arange(block.first, block.last)[:, None, None] * ROW))
    state = _mix(state ^ _low(torch.arange(block.start, block.stop) * COLUMN))
    # unsigned order in signed numbers: both sides are moved by 2**31
    kept = (state ^ _SIGN) >= threshold(call.dropout_prob) - 2**31
    factor = kept.to(n.dtype).mul_(1.0 / (1.0 - call.dropout_prob))
    return factor.reshape(-1, (block.last - block.first) * n.group, block.stop - block.start)


_SIGN = -(2**31)


def _low(x: Tensor) -> Tensor:
    """The lower 32 bits of int64, as int32."""
    return ((x & 0xFFFFFFFF ^ 2**31) - 2**31).to(torch.int32)


def _mix(x: Tensor) -> Tensor:
    """`_mix` of counter.py in int32, whose products wrap and whose shifts must drop the copies of the sign."""
    x = x ^ (x >> 16 & 0xFFFF)
    x = x * _MIX[0]
    x ^= x >> 15 & 0x1FFFF
    x *= _MIX[1]
    x ^= x >> 16 & 0xFFFF
    return x


_MIX = tuple(multiplier - (multiplier >> 31 << 32) for multiplier in MIX)
