"""Which tiles of the scores a rank computes with another rank's keys: full, banded, or none.

Plain integers, the same for torch and jax. Lengths are those of one rank: T queries and S keys of n * T and n * S.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from easytorch.kernels.ring.layout import chunks_of


class Tile(NamedTuple):
    """Row i of `rows` attends to column j of `columns` where i + lower <= j <= i + upper; None is unbounded.

    rows: start and stop among the rank's queries; columns: among the keys at hand; i and j count from their starts.
    first_row, first_column: where the tile starts in the whole matrix of scores.
    """

    rows: tuple[int, int]
    columns: tuple[int, int]
    lower: int | None
    upper: int | None
    first_row: int
    first_column: int

    @property
    def whole(self) -> bool:
        return self.lower is None and self.upper is None

    @property
    def area(self) -> int:
        """How many scores of the tile are not masked."""
        rows, columns = self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]
        seen = 0
        for i in range(rows):
            first = 0 if self.lower is None else max(0, i + self.lower)
            last = columns if self.upper is None else min(columns, i + self.upper + 1)
            seen += max(0, last - first)
        return seen


@functools.lru_cache(maxsize=4096)
def tiles_of(
    rank: int,
    owner: int,
    size: int,
    layout: str,
    length: int,
    keys: int,
    left: int | None,
    right: int | None,
    join: bool = True,
) -> tuple[Tile, ...]:
    """The tiles rank `rank` computes with the keys of `owner`; left and right as in attention/contract.py's band.

    join: adjacent full tiles become one, although their positions need not be adjacent.
    """
    if length == 0 or keys == 0:
        return ()
    query_chunks, key_chunks = chunks_of(layout, rank, size), chunks_of(layout, owner, size)
    rows, columns = length // len(query_chunks), keys // len(key_chunks)
    found: list[Tile] = []
    for i, query_chunk in enumerate(query_chunks):
        for j, key_chunk in enumerate(key_chunks):
            first_row, first_column = query_chunk * rows, key_chunk * columns
            shift = first_row + size * (keys - length) - first_column
            lower = None if left is None else shift - left
            upper = None if right is None else shift + right
            if (upper is not None and rows - 1 + upper < 0) or (lower is not None and lower >= columns):
                continue
            if lower is not None and upper is not None and lower > upper:
                continue
            lower = None if lower is None or rows - 1 + lower <= 0 else lower
            upper = None if upper is None or upper >= columns - 1 else upper
            found.append(
                Tile(
                    (i * rows, (i + 1) * rows),
                    (j * columns, (j + 1) * columns),
                    lower,
                    upper,
                    first_row,
                    first_column,
                )
            )
    if not join:
        return tuple(found)
    if rank == owner and length == keys and left is None and right == 0:
        # a rank's chunks are in order, so together they are causal
        return (Tile((0, length), (0, keys), None, 0, 0, 0),)
    return _joined(_joined(tuple(found), "rows", "columns"), "columns", "rows")


def _joined(tiles: tuple[Tile, ...], fixed: str, joined: str) -> tuple[Tile, ...]:
    """Whole tiles with the same `fixed` range and adjacent `joined` ranges, as one."""
    result: list[Tile] = []
    for tile in tiles:
        start, stop = getattr(tile, joined)
        for index, other in enumerate(result):
            same = getattr(other, fixed) == getattr(tile, fixed)
            if tile.whole and other.whole and same and getattr(other, joined)[1] == start:
                wider: dict[str, Any] = {joined: (getattr(other, joined)[0], stop)}
                result[index] = other._replace(**wider)
                break
        else:
            result.append(tile)
    return tuple(result)


@functools.lru_cache(maxsize=256)
def steps_of(size: int, layout: str, length: int, keys: int, left: int | None, right: int | None) -> int:
    """After how many steps no rank attends to any further keys: a window ends the ring early."""
    for step in range(size - 1, 0, -1):
        if any(tiles_of(rank, (rank - step) % size, size, layout, length, keys, left, right) for rank in range(size)):
            return step + 1
    return 1
