"""Block sizes of the Triton quantized matmul: a table by architecture and rows; there is no autotuning.

Chosen by compiling: the largest tiles whose loops keep everything in registers and load ahead within shared memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tiles(NamedTuple):
    """block_m rows of x, block_n of the weight, block_k columns of both, and how Triton compiles the kernel."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# rows of x up to which an entry applies
_ROWS = (16, 64)
_FORWARD: dict[str, tuple[Tiles, ...]] = {
    "sm_80": (Tiles(16, 32, 128, 4, 4), Tiles(64, 64, 64, 4, 3), Tiles(128, 128, 32, 8, 3)),
    "sm_86": (Tiles(16, 32, 128, 4, 4), Tiles(64, 64, 64, 4, 3), Tiles(128, 128, 32, 8, 3)),
    "sm_90": (Tiles(16, 32, 128, 4, 5), Tiles(64, 64, 64, 4, 4), Tiles(128, 128, 64, 8, 3)),
    "sm_100": (Tiles(16, 32, 128, 4, 5), Tiles(64, 64, 64, 4, 4), Tiles(128, 128, 64, 8, 3)),
    "gfx942": (Tiles(16, 32, 128, 4, 1), Tiles(64, 64, 64, 4, 1), Tiles(128, 128, 64, 8, 1)),
}
_INPUT_GRAD: dict[str, tuple[Tiles, ...]] = {
    "sm_80": (Tiles(16, 64, 64, 4, 3), Tiles(64, 64, 64, 4, 3), Tiles(128, 32, 128, 8, 3)),
    "sm_86": (Tiles(16, 64, 64, 4, 3), Tiles(64, 64, 64, 4, 3), Tiles(128, 32, 128, 8, 3)),
    "sm_90": (Tiles(16, 64, 64, 4, 4), Tiles(64, 64, 64, 4, 4), Tiles(128, 64, 128, 8, 3)),
    "sm_100": (Tiles(16, 64, 64, 4, 4), Tiles(64, 64, 64, 4, 4), Tiles(128, 64, 128, 8, 3)),
    "gfx942": (Tiles(16, 64, 64, 4, 1), Tiles(64, 64, 64, 4, 1), Tiles(128, 64, 128, 8, 1)),
}
# float32 by default does not use tensor cores and keeps operands in registers: smaller tiles, for all architectures
_FLOAT32 = (Tiles(16, 32, 32, 4, 2), Tiles(32, 32, 32, 4, 2), Tiles(64, 32, 32, 4, 2))
# for the interpreter: three different sizes, so that exchanged dimensions are noticed
_INTERPRETER = Tiles(16, 64, 32, 1, 1)


def tiles_of(kernel: str, architecture: str, dtype: torch.dtype, rows: int, group_size: int) -> Tiles:
    """The tiles of `kernel` ("forward", "input_grad") for x of `rows` and `dtype`, each inside one group where
    possible."""
    if architecture == "interpreter":
        tiles = _INTERPRETER
    else:
        table = _FORWARD if kernel == "forward" else _INPUT_GRAD
        row = _FLOAT32 if dtype == torch.float32 else table[architecture]
        tiles = row[sum(rows > most for most in _ROWS)]
    fits = group_size in (32, 64) and kernel == "forward"
    return tiles._replace(block_k=min(tiles.block_k, group_size)) if fits else tiles


def splits_of(tiles: Tiles, rows: int, outputs: int, columns: int, processors: int) -> int:
    """How many programs share the columns of a tile: where there are few tiles, enough to fill the device.

    Each has at least two blocks of columns, and a row has at most 8 partial sums.
    """
    programs = -(-rows // tiles.block_m) * -(-outputs // tiles.block_n)
    wanted = -(-4 * processors // max(programs, 1))
    return max(1, min(8, wanted, columns // (2 * tiles.block_k))) if rows <= _ROWS[0] else 1
