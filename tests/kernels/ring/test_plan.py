"""Which rank holds and computes what: every visible score once, nothing else, and equal work under a causal mask."""

from __future__ import annotations

import pytest
import torch

from easytorch.kernels.ring.layout import position_ids, shard, unshard, zigzag_shard, zigzag_unshard
from easytorch.kernels.ring.plan import steps_of, tiles_of

BANDS = [(None, None), (None, 0), (5, 0), (3, 2), (None, 4), (40, 0), (0, 0)]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_shards_and_positions(layout, size):
    x = torch.randn(3, 24, 2)
    shards = [shard(x, rank, size, 1, layout) for rank in range(size)]
    assert torch.equal(unshard(shards, 1, layout), x)
    for rank, part in enumerate(shards):
        assert torch.equal(x[:, position_ids(24 // size, rank, size, layout)], part)


def test_zigzag_takes_one_early_and_one_late_chunk():
    x = torch.arange(8)
    assert [zigzag_shard(x, rank, 2, 0).tolist() for rank in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert torch.equal(zigzag_unshard([zigzag_shard(x, rank, 2, 0) for rank in range(2)], 0), x)
    with pytest.raises(ValueError, match="pad it to a multiple of 4"):
        zigzag_shard(torch.arange(6), 0, 2, 0)
    with pytest.raises(ValueError, match=r"rank must be in 0\.\.1"):
        zigzag_shard(x, 2, 2, 0)
    with pytest.raises(ValueError, match="contiguous, zigzag"):
        shard(x, 0, 2, 0, "striped")


@pytest.mark.parametrize("join", [True, False])
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize(("queries", "keys"), [(24, 24), (12, 36), (36, 12)])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_visible_score_is_computed_once(size, layout, queries, keys, band, join):
    left, right = band
    got = torch.zeros(queries, keys, dtype=torch.int64)
    steps = steps_of(size, layout, queries // size, keys // size, left, right)
    for rank in range(size):
        rows = position_ids(queries // size, rank, size, layout)
        for step in range(size):
            owner = (rank - step) % size
            columns = position_ids(keys // size, owner, size, layout)
            tiles = tiles_of(rank, owner, size, layout, queries // size, keys // size, left, right, join)
            assert step < steps or not tiles
            for tile in tiles:
                i, j = torch.arange(*tile.rows), torch.arange(*tile.columns)
                offset = j - j[0] - (i - i[0])[:, None]
                seen = torch.ones_like(offset, dtype=torch.bool)
                seen &= (tile.lower is None) | (offset >= (tile.lower or 0))
                seen &= (tile.upper is None) | (offset <= (tile.upper or 0))
                assert seen.sum() == tile.area > 0
                got[rows[i][:, None], columns[j]] += seen
                if not join:
                    assert (rows[i[0]], columns[j[0]]) == (tile.first_row, tile.first_column)
    offset = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
    want = torch.ones_like(offset, dtype=torch.bool)
    want &= (left is None) | (offset >= -(left or 0))
    want &= (right is None) | (offset <= (right or 0))
    assert torch.equal(got, want.long())


def work(size, layout, length=32):
    return [
        sum(tile.area for owner in range(size) for tile in tiles_of(rank, owner, size, layout, length, length, None, 0))
        for rank in range(size)
    ]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_zigzag_balances_causal_work(size):
    zigzag, contiguous = work(size, "zigzag"), work(size, "contiguous")
    assert len(set(zigzag)) == 1
    assert sum(zigzag) == sum(contiguous)
    assert max(contiguous) > 1.4 * max(zigzag)
    # what is masked out entirely is not computed: own tile, then one for each other rank
    for rank in range(size):
        assert all(len(tiles_of(rank, owner, size, "zigzag", 32, 32, None, 0)) == 1 for owner in range(size))


def test_a_window_ends_the_ring_early():
    assert steps_of(8, "contiguous", 64, 64, 63, 0) == 2
    assert steps_of(8, "contiguous", 64, 64, 64, 0) == 2
    assert steps_of(8, "contiguous", 64, 64, 66, 0) == 3
    assert steps_of(8, "contiguous", 64, 64, None, 0) == 8
