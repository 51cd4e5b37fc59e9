"""The steps of block-sparse attention on the CPU: for each block of queries, the keys that any of its rows sees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from easytorch.kernels.blocksparse.structure import Structure

ROWS = 128  # of a block: 64 and 256 were slower for a window of 512 and documents of 512 (EPYC, AVX-512, 2 cores)
GRAIN = 64  # keys of a block inside an interval: those of them that a mask leaves empty are left out


class Step(NamedTuple):
    """Rows of `batch` and the keys they attend to.

    columns: a slice, or int64 positions where a mask leaves gaps. seen: boolean, broadcasts to (b, H, rows, columns);
    None where every row sees every column. Keys that are not among `columns` are never read.
    """

    batch: slice
    rows: slice
    columns: slice | Tensor
    seen: Tensor | None

    @property
    def scores(self) -> int:
        """The number of scores that it computes for one head."""
        columns = self.columns
        width = columns.stop - columns.start if isinstance(columns, slice) else columns.numel()
        return (self.rows.stop - self.rows.start) * width


def steps(
    structure: Structure, batch: int, mask: Tensor | None, query_ids: Tensor | None, key_ids: Tensor | None
) -> Iterator[Step]:
    """The steps of a call; rows that see nothing may be in none. mask: (B, H, T, S), any of them 1."""
    own_intervals = structure.begin.shape[0]
    units = [slice(0, batch)] if own_intervals == 1 and query_ids is None else [slice(b, b + 1) for b in range(batch)]
    limits = _limits(structure)
    for number, unit in enumerate(units):
        place = number if own_intervals > 1 else 0
        begin, end = structure.begin[place], structure.end[place]
        for block, (low, high, last_begin, first_end) in enumerate(limits[place]):
            if high <= low:
                continue
            rows = slice(block * ROWS, min((block + 1) * ROWS, begin.shape[0]))
            seen = None
            if last_begin > low or first_end < high:
                position = torch.arange(low, high, dtype=torch.int32)
                seen = (position >= begin[rows, None]) & (position < end[rows, None])
            if mask is None and query_ids is None:
                yield Step(unit, rows, slice(low, high), seen)
                continue
            parts = [] if seen is None else [seen]
            if mask is not None:
                parts.append(part_of(mask, unit, rows, slice(low, high)))
            if query_ids is not None and key_ids is not None:
                parts.append((query_ids[unit, rows, None] == key_ids[unit, None, low:high])[:, None])
            yield from _without_gaps(unit, rows, low, high, parts)


def _limits(structure: Structure) -> list[list[tuple[int, int, int, int]]]:
    """(first begin, last end, last begin, first end) of each block of rows. Rows that see no key do not count for the
    first two."""
    begin, end = structure.begin, structure.end
    missing = -begin.shape[1] % ROWS
    empty = begin >= end
    nothing = torch.iinfo(begin.dtype).max

    def of_blocks(values: Tensor, fill: int) -> Tensor:
        return torch.nn.functional.pad(values, (0, missing), value=fill).unflatten(1, (-1, ROWS))

    if begin.shape[1] == 0:
        return [[] for _ in range(begin.shape[0])]
    low = of_blocks(torch.where(empty, nothing, begin), nothing).amin(2)
    high = of_blocks(torch.where(empty, 0, end), 0).amax(2)
    last_begin, first_end = of_blocks(torch.where(empty, nothing, begin), 0).amax(2), of_blocks(end, nothing).amin(2)
    return torch.stack((low, high, last_begin, first_end), dim=2).tolist()


def _without_gaps(unit: slice, rows: slice, low: int, high: int, parts: list[Tensor]) -> Iterator[Step]:
    """The step for keys low..high of which a row sees those that all of `parts` let it see."""
    seen = parts[0]
    for part in parts[1:]:
        seen = seen & part
    if seen.shape[-1] == 1:
        seen = seen.expand(*seen.shape[:-1], high - low)
    occupied = seen.reshape(-1, high - low).any(0)
    found = occupied.nonzero()[:, 0]
    if found.numel() == 0:
        return
    first, last = int(found[0]), int(found[-1]) + 1
    blocks = (found // GRAIN).unique()
    positions = (blocks[:, None] * GRAIN + torch.arange(GRAIN)).flatten()
    positions = positions[(positions >= first) & (positions < last)]
    columns: slice | Tensor = slice(low + first, low + last)
    if positions.numel() < last - first:
        columns, seen = low + positions, seen[..., positions]
    else:
        seen = seen[..., first:last]
    yield Step(unit, rows, columns, None if bool(seen.all()) else seen)


def part_of(matrix: Tensor, batch: slice, rows: slice, columns: slice | Tensor) -> Tensor:
    """The step's part of a matrix that broadcasts to (B, H, T, S); dimensions of 1 stay 1."""
    if matrix.shape[0] != 1:
        matrix = matrix[batch]
    if matrix.shape[2] != 1:
        matrix = matrix[:, :, rows]
    return matrix[..., columns] if matrix.shape[3] != 1 else matrix
