"""Block sizes of the Triton grouped matmul: a table by architecture and rows per expert, without autotuning.

Chosen by compiling: the largest tiles whose loops keep everything in registers and load ahead within shared memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tiles(NamedTuple):
    """block_m rows by block_n columns, block_k of the depth at once, and how Triton compiles the kernel."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# mean rows an expert up to which the forward's column of tiles is taken
_ROWS = (16, 64)
_FORWARD: dict[str, tuple[Tiles, ...]] = {
    "sm_80": (Tiles(16, 64, 128, 4, 4), Tiles(64, 128, 64, 4, 3), Tiles(128, 128, 64, 8, 3)),
    "sm_86": (Tiles(16, 64, 128, 4, 3), Tiles(64, 128, 32, 4, 3), Tiles(128, 128, 32, 8, 3)),
    "sm_90": (Tiles(16, 64, 128, 4, 5), Tiles(64, 128, 64, 4, 4), Tiles(128, 256, 64, 8, 3)),
    "sm_100": (Tiles(16, 64, 128, 4, 5), Tiles(64, 128, 64, 4, 4), Tiles(128, 256, 64, 8, 3)),
    "gfx942": (Tiles(16, 64, 64, 4, 1), Tiles(64, 128, 64, 4, 1), Tiles(128, 128, 64, 8, 1)),
}
_WEIGHT_GRAD: dict[str, Tiles] = {
    "sm_80": Tiles(64, 128, 128, 8, 3),
    "sm_86": Tiles(32, 128, 128, 8, 3),
    "sm_90": Tiles(64, 128, 256, 8, 3),
    "sm_100": Tiles(64, 128, 256, 8, 3),
    "gfx942": Tiles(64, 128, 128, 8, 1),
}
# float32 multiplies without tensor cores by default, with operands in registers: smaller tiles, alike everywhere
_FLOAT32 = (Tiles(16, 64, 32, 4, 2), Tiles(64, 64, 16, 8, 2), Tiles(64, 64, 16, 8, 2))
_FLOAT32_WEIGHT_GRAD = Tiles(16, 64, 64, 8, 2)
# the interpreter has no limits; sizes differ, so that swapped dimensions would be noticed
_INTERPRETER = Tiles(16, 32, 64, 1, 1)


def forward_tiles(architecture: str, dtype: torch.dtype, rows: int, experts: int) -> Tiles:
    """The tiles for `rows` in all; how they fall to the experts is known to the device only."""
    if architecture == "interpreter":
        return _INTERPRETER
    row = _FLOAT32 if dtype == torch.float32 else _FORWARD[architecture]
    mean = rows / max(experts, 1)
    return row[sum(mean > most for most in _ROWS)]


def weight_grad_tiles(architecture: str, dtype: torch.dtype) -> Tiles:
    """block_m rows at once, of a block_n by block_k tile of the gradient."""
    if architecture == "interpreter":
        return _INTERPRETER
    return _FLOAT32_WEIGHT_GRAD if dtype == torch.float32 else _WEIGHT_GRAD[architecture]
