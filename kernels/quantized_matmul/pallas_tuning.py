"""Block sizes of the Pallas quantized matmul, by rows of x; there is no autotuning.

Every entry is compiled for v4, v5e, v5p and v6e by the real compiler (tests/tpu/test_compile_matmul.py), which fails
where a kernel needs more vector memory than the chip has. They were not timed on a TPU.
"""

from __future__ import annotations

from typing import NamedTuple

LANES = 128


class BlockSizes(NamedTuple):
    """rows of x, rows of the weight, and columns of stored bytes of it; the last two are multiples of 128."""

    rows: int
    outputs: int
    columns: int


# (rows of x at most, blocks): few rows: long reads of the weight
_TABLE = ((64, BlockSizes(64, 512, 1024)), (None, BlockSizes(256, 256, 512)))


def blocks_of(rows: int, outputs: int, stored: int) -> BlockSizes:
    """For x of `rows`, and a weight of `outputs` rows of `stored` bytes, a multiple of 128; `columns` divides
    `stored`."""
    found = next(blocks for most, blocks in _TABLE if most is None or rows <= most)
    lanes = stored // LANES
    parts = next(n for n in range(min(found.columns // LANES, lanes), 0, -1) if lanes % n == 0)
    return BlockSizes(
        min(found.rows, -(-rows // 16) * 16), min(found.outputs, -(-outputs // LANES) * LANES), parts * LANES
    )
