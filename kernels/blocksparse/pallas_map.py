"""The walk of the Pallas kernels: a static list of the tiles that may be needed, and for each of them its state, which
depends on data.

A grid step takes one entry of the list. Tiles that the structure alone leaves empty are not in it; a tile that
segments, a mask or a prefix leave empty keeps its step, which then neither computes nor fetches anything.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from easytorch.kernels.attention.pallas_flash_tiles import Grid
from easytorch.kernels.blocksparse.structure import Rule

EMPTY, PARTIAL, FULL = 0, 1, 2
_NOTHING = np.iinfo(np.int32).max


class Walk(NamedTuple):
    """owners: int32 (N + 2,), the tile a step adds to, -1 before the first and after the last; steps of one owner are
    neighbours. tiles: int32 (B or 1, N), 4 * the tile of the other side that is fetched + EMPTY, PARTIAL or FULL.
    """

    owners: Array
    tiles: Array

    @property
    def steps(self) -> int:
        return int(self.tiles.shape[1])


def candidate_blocks(n: Grid, rule: Rule, *, everything: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row tile, column tile, state) of every tile that may be needed, by row tiles; what is static of its state.

    everything: list the empty tiles too. A row tile that needs none has one, EMPTY.
    """
    # an array's prefixes are not known: the longest possible one lists every tile that any of them needs
    prefix = n.keys if rule.prefix is True else rule.prefix
    begin, end = rule.of(np.arange(n.length)[None] + n.shift, n.keys, prefix)
    state = _states(np, n, *(np.asarray(x, np.int32) for x in (begin, end)))[0]
    rows, columns = np.nonzero(np.ones_like(state) if everything else state)
    missing = np.setdiff1d(np.arange(n.row_tiles), rows)
    rows, columns = np.concatenate([rows, missing]), np.concatenate([columns, np.zeros_like(missing)])
    order = np.lexsort((columns, rows))
    return rows[order], columns[order], state[rows[order], columns[order]]


def walks(
    n: Grid, rule: Rule, begin: Array, end: Array, mask: Array | None, query_segments: Array | None,
    key_segments: Array | None, *, by_columns: bool, everything: bool = False,
) -> Walk:  # fmt: skip
    """The walk of a call by row tiles, or by column tiles. begin, end (B or 1, T); mask (Bx, Hx, Tx, Sx)."""
    rows, columns, static = candidate_blocks(n, rule, everything=everything)
    if by_columns:
        missing = np.setdiff1d(np.arange(n.column_tiles), columns)
        rows, columns = np.concatenate([rows, np.zeros_like(missing)]), np.concatenate([columns, missing])
        static = np.concatenate([static, np.zeros_like(missing)])
        order = np.lexsort((rows, columns))
        rows, columns, static = rows[order], columns[order], static[order]
    state = jnp.asarray(static, jnp.int32)[None]
    if rule.prefix is True or mask is not None or query_segments is not None:
        state = _states(jnp, n, begin, end)
        if query_segments is not None and key_segments is not None:
            state = jnp.minimum(state, _of_segments(n, query_segments, key_segments))
        if mask is not None:
            state = jnp.minimum(state, _of_mask(n, mask))
        state = jnp.broadcast_to(state, (state.shape[0], n.row_tiles, n.column_tiles))[:, rows, columns]
    owner, other = (columns, rows) if by_columns else (rows, columns)
    # a step that computes nothing requests the tile already loaded
    place = jnp.where(state != EMPTY, jnp.arange(len(owner))[None], 0)
    fetched = jnp.asarray(other, jnp.int32)[lax.cummax(place, axis=1)]
    return Walk(jnp.asarray(np.concatenate([[-1], owner, [-1]]), jnp.int32), fetched * 4 + state.astype(jnp.int32))


def _tiles(xp: Any, x: Any, size: int, fill: int) -> Any:
    """(B, N) -> (B, tiles, size)."""
    padded = xp.pad(x, ((0, 0), (0, -x.shape[1] % size)), constant_values=fill)
    return padded.reshape(x.shape[0], -1, size)


def _states(xp: Any, n: Grid, begin: Any, end: Any) -> Any:
    """(B or 1, row tiles, column tiles) by the intervals (B or 1, T) alone."""
    empty = begin >= end
    low = _tiles(xp, xp.where(empty, _NOTHING, begin), n.rows, _NOTHING).min(2)[..., None]
    high = _tiles(xp, xp.where(empty, 0, end), n.rows, 0).max(2)[..., None]
    all_begin = _tiles(xp, xp.where(empty, _NOTHING, begin), n.rows, 0).max(2)[..., None]
    all_end = _tiles(xp, end, n.rows, _NOTHING).min(2)[..., None]
    start = np.arange(n.column_tiles) * n.columns
    some = (low < start + n.columns) & (high > start)
    every = (all_begin <= start) & (all_end >= start + n.columns)
    return some.astype(xp.int32) + (some & every).astype(xp.int32)


def _of_segments(n: Grid, query_segments: Array, key_segments: Array) -> Array:
    """An upper bound of what the segment ids (B, T) and (B, S) leave visible of each tile: 0 none, 1 some, 2 all."""
    least, most = -_NOTHING - 1, _NOTHING
    q_low, q_high = (
        _tiles(jnp, query_segments, n.rows, fill)[..., None] for fill in (most, least)
    )  # fmt: skip
    k_low, k_high = (_tiles(jnp, key_segments, n.columns, fill)[:, None] for fill in (most, least))
    q_low, q_high, k_low, k_high = q_low.min(2), q_high.max(2), k_low.min(3), k_high.max(3)
    some = (q_low <= k_high) & (q_high >= k_low)
    every = (q_low == k_high) & (q_high == k_low)
    return some.astype(jnp.int32) + every.astype(jnp.int32)


def _of_mask(n: Grid, mask: Array) -> Array:
    """How much of each tile a mask (Bx, Hx, Tx, Sx) leaves visible, over all heads: 0 none, 1 some, 2 all; a side of 1
    stays 1."""

    def reduced(seen: Array, fill: int, reduce: Any) -> Array:
        seen = seen.astype(jnp.int32)
        for axis, size in ((1, n.rows), (2, n.columns)):
            if seen.shape[axis] != 1:
                moved = jnp.moveaxis(seen, axis, 2)
                flat = _tiles(jnp, moved.reshape(-1, moved.shape[2]), size, fill)
                moved = reduce(flat, 2).reshape(*moved.shape[:2], -1)
                seen = jnp.moveaxis(moved, 2, axis)
        return seen

    return reduced(mask.any(1), 0, jnp.max) + reduced(mask.all(1), 1, jnp.min)
