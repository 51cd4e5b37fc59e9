"""Block sizes of the Pallas grouped matmul, by dtype and rows per expert, without autotuning at run time.

Every entry is compiled for v4, v5e, v5p and v6e by the real compiler (tests/tpu/test_compile_matmul.py), which fails
where a kernel needs more vector memory than the chip allows. They have not been timed on a TPU.
"""

from __future__ import annotations

from typing import NamedTuple


class BlockSizes(NamedTuple):
    """rows by columns of an output tile, and the depth multiplied at once; the last two are multiples of 128."""

    rows: int
    columns: int
    depth: int


LANES = 128
# bits of an element -> (mean rows an expert at most, blocks); few rows want long reads of the weight
_TABLE = {
    16: ((64, BlockSizes(64, 512, 2048)), (None, BlockSizes(256, 512, 1024))),
    32: ((64, BlockSizes(64, 512, 1024)), (None, BlockSizes(256, 512, 512))),
}
# of the weight's gradient: rows multiplied at once, of a tile of columns by depth
_WEIGHT_GRAD = {16: BlockSizes(512, 512, 512), 32: BlockSizes(256, 512, 512)}


def forward_blocks(rows: int, experts: int, columns: int, depth: int, bits: int) -> BlockSizes:
    mean = rows / max(experts, 1)
    return _fitted(next(b for most, b in _TABLE[bits] if most is None or mean <= most), rows, columns, depth)


def weight_grad_blocks(rows: int, columns: int, depth: int, bits: int) -> BlockSizes:
    return _fitted(_WEIGHT_GRAD[bits], rows, columns, depth)


def _fitted(blocks: BlockSizes, rows: int, columns: int, depth: int) -> BlockSizes:
    """No larger than the operands; depth divides its length, rounded up to lanes, so that nothing else is padded."""
    lanes = -(-depth // LANES)
    parts = next(n for n in range(min(blocks.depth // LANES, lanes), 0, -1) if lanes % n == 0)
    return BlockSizes(min(blocks.rows, -(-rows // 16) * 16), min(blocks.columns, _up(columns)), parts * LANES)


def _up(size: int) -> int:
    return -(-size // LANES) * LANES
