"""Arrays as streams of bytes, in blocks far smaller than they are."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from easytorch.bridge.core import blocks
from easytorch.bridge.core.compare import identical
from easytorch.bridge.dtypes import NAMES_OF_CODES, numpy_dtype

RNG = np.random.default_rng(0)


def _random(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    count = int(np.prod(shape))
    if dtype.kind == "b":
        return RNG.integers(0, 2, shape).astype(bool)
    return np.frombuffer(RNG.bytes(count * dtype.itemsize), dtype).reshape(shape)


def _streamed(array: np.ndarray) -> bytes:
    return b"".join(bytes(block) for block in blocks.byte_blocks(array))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    """Limits so small that every way of cutting is taken."""
    size = request.param
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", size)
    monkeypatch.setattr(blocks, "_PLAIN_BYTES", max(size, 16))
    monkeypatch.setattr(blocks, "_RUN_BYTES", min(size, 256))
    monkeypatch.setattr(blocks, "_LARGEST_BLOCK_BYTES", 4 * size)
    monkeypatch.setattr(blocks, "_TILE_BYTES", 3 * size)
    return size


@pytest.mark.parametrize("dtype", [*NAMES_OF_CODES.values(), "complex128", "int4"])
@pytest.mark.parametrize("axes", [(1, 0), (2, 1, 0), (0, 2, 1), (2, 3, 1, 0)])
def test_every_element_type_and_transpose(dtype: str, axes: tuple[int, ...]) -> None:
    array = _random((67, 63, 5, 3)[: len(axes)], numpy_dtype(dtype)).transpose(axes)
    assert _streamed(array) == array.tobytes()


@pytest.mark.parametrize("small_blocks", [1, 64, 5000, 1 << 20], indirect=True)
def test_any_strides_in_any_blocks(small_blocks: int) -> None:
    for _ in range(60):
        rank = int(RNG.integers(1, 6))
        most = {1: 5000, 2: 150, 3: 30, 4: 13, 5: 7}[rank]
        shape = tuple(int(size) for size in RNG.integers(1, most, rank))
        array = _random(shape, np.dtype(RNG.choice(["f4", "i2", "u1", "c16"]))).transpose(RNG.permutation(rank))
        if RNG.random() < 0.4:
            array = array[tuple(slice(None, None, int(RNG.choice([1, 2, -1]))) for _ in shape)]
        assert _streamed(array) == array.tobytes(), (shape, array.strides)


@pytest.mark.parametrize("small_blocks", [1, 64, 1000], indirect=True)
def test_blocks_stay_small(small_blocks: int) -> None:
    array = np.arange(5 * 7 * 11, dtype=np.int16).reshape(5, 7, 11)
    for axes in [(2, 1, 0), (1, 2, 0), (2, 0, 1)]:
        sizes = [len(block) for block in blocks.byte_blocks(array.transpose(axes))]
        assert max(sizes) <= max(4 * small_blocks, array.itemsize)


@pytest.mark.parametrize("shape", [(), (0, 3), (1, 1), (3, 0)])
def test_little(shape: tuple[int, ...]) -> None:
    assert _streamed(np.ones(shape).T) == np.ones(shape).tobytes()


def test_repeated_elements() -> None:
    array = np.broadcast_to(np.arange(100, dtype=np.float32)[:, None], (100, 90))
    assert _streamed(array) == array.tobytes()


def test_nothing_is_copied_of_a_contiguous_array() -> None:
    array = np.ones(10, ml_dtypes.bfloat16)
    (block,) = blocks.byte_blocks(array)
    assert np.shares_memory(np.frombuffer(block, np.uint8), array)


def test_arrays_are_compared_whatever_their_strides() -> None:
    one = _random((701, 501), np.dtype(np.float32))
    other = np.array(one.T).T
    assert identical(one, other) and identical(other[::2], one[::2])
    other.view(np.uint32)[-1, -1] ^= 1
    assert not identical(one, other) and not identical(one, one[:, ::-1]) and not identical(one, one.T)
    assert identical(np.full(3, np.nan), np.full(3, np.nan)) and not identical(np.zeros(3), -np.zeros(3))
    assert identical(np.empty((0, 2)), np.ones((0, 2)))
