"""Shared code of the Pallas kernels beside kernels/attention/pallas_flash_tiles.py: one step over tiles, its scores."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from easytorch.kernels.attention.jax_call import AttentionCall
from easytorch.kernels.attention.pallas_flash_tiles import Grid, numbers_of, scores


class TileStep(NamedTuple):
    """The tile of the other side, and what of it is seen (pallas_map.py)."""

    tile: Any
    state: Any


def step_of(tiles: Any, batch: Any, step: Any) -> TileStep:
    """tiles: `Walk.tiles` in scalar memory."""
    packed = tiles[batch if tiles.shape[0] > 1 else 0, step]
    return TileStep(lax.shift_right_logical(packed, 2), packed & 3)


def interval_spec(n: Grid, interval: Array, place: Any) -> Any:
    """The BlockSpec of `begin` or `end` (B or 1, 1, T); place(*grid) -> (batch, row tile)."""
    many = interval.shape[0] > 1

    def index(*grid: Any) -> tuple[Any, ...]:
        batch, row = place(*grid)
        return batch if many else 0, 0, row

    return pl.BlockSpec((1, 1, n.rows), index)


def seen_scores(
    n: Grid, call: AttentionCall, query: Array, key: Array, begin: Array, end: Array, i: Any, j: Any,
    partial: bool,
) -> tuple[Array, Array]:  # fmt: skip
    """query (R, D), key (C, D) -> scores (C, R) float32, -inf where unseen, and the same before bias and masks.

    A tile that is not partial is seen by every row: neither mask nor segments nor intervals (1, R) are looked at.
    """
    if not partial:
        return scores(n, numbers_of(call)._replace(bias=call.bias), query, key, i, j, False)
    result, capped = scores(n, call, query, key, i, j, False)
    columns = j * n.columns + lax.broadcasted_iota(jnp.int32, (n.columns, n.rows), 0)
    return jnp.where((columns >= begin) & (columns < end), result, -jnp.inf), capped
