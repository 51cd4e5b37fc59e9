"""The intervals against the definition's mask, for random structures."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from easytorch.kernels.attention.contract import window_of
from easytorch.kernels.blocksparse import native
from easytorch.kernels.blocksparse.structure import intervals, structure_of, within_segments

SIDES = st.one_of(st.none(), st.integers(0, 12))
STRUCTURES = st.fixed_dictionaries(
    {
        "causal": st.booleans(),
        "sliding_window": st.one_of(st.none(), st.integers(1, 9), st.tuples(SIDES, SIDES)),
        "chunk_size": st.one_of(st.none(), st.integers(1, 12)),
        "prefix_length": st.one_of(st.none(), st.integers(0, 30), st.lists(st.integers(0, 30), min_size=2, max_size=2)),
    }
)


def _seen(length: int, keys: int, **features: Any) -> torch.Tensor:
    """(2, T, S): the weights of the definition that are not zero."""
    query, key = torch.zeros(2, length, 1, 1), torch.zeros(2, keys, 1, 1)
    return native.attention(query, key, key, **features)[1][:, 0] > 0


def _of_intervals(begin: torch.Tensor, end: torch.Tensor, keys: int) -> torch.Tensor:
    column = torch.arange(keys)
    return ((column >= begin[..., None]) & (column < end[..., None])).expand(2, -1, -1)


@settings(max_examples=200, deadline=None)
@given(length=st.integers(1, 20), keys=st.integers(1, 25), structure=STRUCTURES)
def test_intervals_are_what_the_definition_sees(length: int, keys: int, structure: dict[str, Any]) -> None:
    if isinstance(structure["prefix_length"], list):
        structure = {**structure, "prefix_length": torch.tensor(structure["prefix_length"])}
    found = structure_of(length, keys, torch.device("cpu"), **structure)
    seen = _seen(length, keys, **structure)
    assert torch.equal(_of_intervals(found.begin, found.end, keys), seen)
    # neither side decreases, and the band holds all that is seen
    assert (found.begin.diff() >= 0).all() and (found.end.diff() >= 0).all()
    if found.left is not None or found.right is not None:
        band = _seen(length, keys, sliding_window=(found.left, found.right))
        assert not (seen & ~band).any()
    if not isinstance(structure["prefix_length"], torch.Tensor):
        window = window_of(structure["sliding_window"])
        numbers = (structure["chunk_size"], structure["prefix_length"])
        begin, end = intervals(np.arange(length)[None] + keys - length, keys, structure["causal"], *window, *numbers)
        assert np.array_equal(begin, found.begin.numpy()) and np.array_equal(end, found.end.numpy())


@settings(max_examples=200, deadline=None)
@given(data=st.data(), length=st.integers(1, 12), keys=st.integers(1, 15), causal=st.booleans())
def test_segments_narrow_the_intervals(data: st.DataObject, length: int, keys: int, causal: bool) -> None:
    def ids(size: int) -> torch.Tensor:
        return torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=2 * size, max_size=2 * size))).view(2, size)

    query_ids, key_ids = ids(length), ids(keys)
    if data.draw(st.booleans()):
        key_ids = key_ids.sort(dim=1)[0]
    structure = structure_of(length, keys, torch.device("cpu"), causal=causal)
    narrowed, exact = within_segments(structure, query_ids, key_ids)
    seen = _seen(length, keys, causal=causal, query_segment_ids=query_ids, key_segment_ids=key_ids)
    covered = _of_intervals(narrowed.begin, narrowed.end, keys)
    assert not (seen & ~covered).any()
    if exact:
        assert torch.equal(covered, seen)
    elif not causal:
        assert not torch.equal(covered, seen)
    if torch.equal(key_ids, key_ids.sort(dim=1)[0]):
        assert exact
