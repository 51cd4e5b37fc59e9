"""Arrays as a stream of bytes, in blocks far smaller than they are."""

import numpy as np
import pytest

from easytorch.bridge.formats import mapped


@pytest.mark.parametrize("block", [1, 7, 64, 1000, 10**9])
@pytest.mark.parametrize("axes", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_blocks_are_the_bytes_in_order(monkeypatch, block, axes):
    monkeypatch.setattr(mapped, "_BLOCK_BYTES", block)
    array = np.arange(5 * 7 * 11, dtype=np.int16).reshape(5, 7, 11).transpose(axes)
    blocks = list(mapped.byte_blocks(array))
    assert b"".join(blocks) == array.tobytes()
    if axes != (0, 1, 2):
        assert max(len(one) for one in blocks) <= max(block, array.itemsize)


@pytest.mark.parametrize("shape", [(), (0, 3), (1, 1)])
def test_blocks_of_little(shape):
    assert b"".join(mapped.byte_blocks(np.ones(shape))) == np.ones(shape).tobytes()
