"""contract.py's own arithmetic, against the sentences of its docstring as loops: every kernel and the definition take
the band from there, so that none of them would notice that it is wrong."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.attention.contract import band_of, visible, window_of

WINDOWS: list[Any] = [
    None, 1, 2, 5, 2**40, (0, 0), (2, 3), (0, 2), (3, 0), (None, 2), (2, None), (-1, 1), (1, -1), (None, None),
    (2**31, 1), [1, 2],
]  # fmt: skip


def _sees(i: int, j: int, shift: int, causal: bool, window: Any) -> bool:
    own = i + shift
    if causal and j > own:
        return False
    if window is None:
        return True
    left, right = (window - 1, window - 1) if isinstance(window, int) else window
    return (left in (None, -1) or j >= own - left) and (right in (None, -1) or j <= own + right)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_a_band_is_what_each_query_sees_of_each_key(window: Any, causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    for (length, keys), shift in itertools.product([(1, 1), (1, 6), (7, 7), (4, 9), (9, 4), (5, 0)], [None, 0, 3, -2]):
        own = keys - length if shift is None else shift
        band = [[_sees(i, j, own, causal, window) for j in range(keys)] for i in range(length)]
        expected = torch.tensor(band, dtype=torch.bool).reshape(length, keys)
        left, right = band_of(causal, window)
        seen = visible(AttentionCall(left=left, right=right), length, keys, torch.device("cpu"), shift=shift)
        assert torch.equal(expected if seen is None else seen, expected), (length, keys, shift)
        assert seen is not None or bool(expected.all())

        sides = [
            [(left is None or j >= i + own - left) and (right is None or j <= i + own + right) for j in range(keys)]
            for i in range(length)
        ]
        assert sides == band

        mask = torch.rand(2, 1, length, keys, generator=generator) > 0.3
        rows = torch.randint(0, 2, (2, length), generator=generator)
        columns = torch.randint(0, 2, (2, keys), generator=generator)
        call = AttentionCall(mask=mask, query_segment_ids=rows, key_segment_ids=columns, left=left, right=right)
        everything = visible(call, length, keys, torch.device("cpu"), shift=shift)
        assert everything is not None and everything.shape == (2, 1, length, keys)
        for b, i, j in itertools.product(range(2), range(length), range(keys)):
            wanted = bool(mask[b, 0, i, j]) and bool(rows[b, i] == columns[b, j]) and band[i][j]
            assert bool(everything[b, 0, i, j]) == wanted


def test_the_sides_of_a_window() -> None:
    assert window_of(None) == (None, None)
    assert window_of(4) == (3, 3)
    assert window_of((4, 0)) == (4, 0)
    assert window_of((-1, 2)) == (None, 2)
    assert band_of(True, (2, 5)) == (2, 0)
    assert band_of(True, None) == (None, 0)
    assert band_of(False, (2, 5)) == (2, 5)
