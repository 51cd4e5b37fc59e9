"""Block sizes of the Pallas flash kernels, by shape class, without autotuning at run time.

Entries are compiled for v4, v5e, v5p and v6e by the real compiler (tests/tpu/test_compile_flash.py), which fails where
a kernel needs more vector memory than the chip allows. They have not been timed on a TPU.
"""

from __future__ import annotations

from typing import NamedTuple


class BlockSizes(NamedTuple):
    """Queries and keys of a tile; both multiples of 128, the lanes of a vector register."""

    rows: int
    columns: int


# (widest head_dim, blocks of the forward, blocks of the backward), for 16 and for 32 bits per element
_TABLE: dict[int, tuple[tuple[int, BlockSizes, BlockSizes], ...]] = {
    16: ((128, BlockSizes(512, 512), BlockSizes(512, 512)), (256, BlockSizes(512, 512), BlockSizes(256, 512))),
    32: ((128, BlockSizes(512, 512), BlockSizes(256, 512)), (256, BlockSizes(256, 512), BlockSizes(256, 256))),
}
_WIDER = BlockSizes(128, 256)


def forward_blocks(head_dim: int, bits: int) -> BlockSizes:
    """head_dim: the larger of the query's and the value's; bits: of an element."""
    return next((forward for widest, forward, _ in _TABLE[bits] if head_dim <= widest), _WIDER)


def backward_blocks(head_dim: int, bits: int) -> BlockSizes:
    return next((backward for widest, _, backward in _TABLE[bits] if head_dim <= widest), _WIDER)
