"""Writing into pages on a CPU, which goes past the operator where nothing traces or intercepts the call."""

from __future__ import annotations

import pytest
import torch

from easytorch.kernels.ragged_page.write import write_page
from easytorch.layers.captured_step import HostReads


@pytest.mark.parametrize("slots", [[3, 0, 14], [3, -1, 14], [-1, -1, -1]])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("layout", ["contiguous", "strided", "bfloat16"])
def test_the_slots_alone_change(slots, index, layout, monkeypatch):
    pages = torch.randn(4, 2 * 4, 2, 5)
    pages = pages[:, ::2] if layout == "strided" else pages[:, :4].contiguous()
    pages = pages.bfloat16() if layout == "bfloat16" else pages
    rows = torch.randn(3, 2, 5, dtype=pages.dtype)
    want = pages.clone()
    for row, slot in zip(rows, slots, strict=True):
        if slot >= 0:
            want[slot // 4, slot % 4] = row
    by_operator = pages.clone()
    torch.ops.easytorch.write_page(by_operator, rows, torch.tensor(slots, dtype=index))

    def operator(*_):
        raise AssertionError("the operator of Python ran")

    monkeypatch.setattr("easytorch.kernels.ragged_page.write._write", operator)
    assert write_page(pages, rows, torch.tensor(slots, dtype=index)) is pages
    assert torch.equal(pages, want) and torch.equal(by_operator, want)
    for wrong in ([3, 0, 16], [-2, 0, 1]):
        with pytest.raises(ValueError, match=r"slots must be -1 or in 0\.\.15"):
            write_page(pages, rows, torch.tensor(wrong))
    assert torch.equal(pages, want)
    write_page(pages, rows[:0], torch.tensor([], dtype=index))
    with HostReads(), pytest.raises(AssertionError, match="the operator"):
        write_page(pages, rows, torch.tensor(slots, dtype=index))
