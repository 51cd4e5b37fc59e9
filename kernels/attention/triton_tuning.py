"""Block sizes of the Triton kernels: a table by architecture and bytes per row of a head, without autotuning.

An autotuner would time its candidates at the first call of every shape, differently on every rank, and does not work in
a captured graph. docs/kernels/triton_flash.md lists the registers and shared memory of each entry.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tiles(NamedTuple):
    """block_m queries by block_n keys, and how Triton compiles the kernel."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# kernel -> architecture -> tiles for 16 bits, padded head_dim at most 64, 128, 256. Chosen by compiling: the largest
# whose inner loops keep everything in registers and, where they fit, load one block ahead.
_HEAD_DIMS = (64, 128, 256)
_TABLE: dict[str, dict[str, tuple[Tiles, ...]]] = {
    "forward": {
        "sm_80": (Tiles(128, 64, 4, 3), Tiles(128, 64, 8, 3), Tiles(64, 32, 8, 2)),
        "sm_86": (Tiles(128, 64, 4, 3), Tiles(64, 32, 4, 2), Tiles(64, 32, 8, 2)),
        "sm_90": (Tiles(128, 128, 8, 3), Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 2)),
        "sm_100": (Tiles(128, 128, 8, 3), Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 2)),
        "gfx942": (Tiles(128, 64, 4, 1), Tiles(128, 32, 4, 1), Tiles(64, 32, 4, 1)),
    },
    "key_value_grad": {
        "sm_80": (Tiles(64, 128, 8, 2), Tiles(32, 128, 8, 2), Tiles(32, 32, 4, 1)),
        "sm_86": (Tiles(32, 128, 8, 2), Tiles(32, 64, 8, 2), Tiles(16, 32, 4, 1)),
        "sm_90": (Tiles(64, 128, 8, 2), Tiles(32, 128, 8, 2), Tiles(32, 32, 4, 1)),
        "sm_100": (Tiles(64, 128, 8, 2), Tiles(32, 128, 8, 2), Tiles(32, 32, 4, 1)),
        "gfx942": (Tiles(32, 64, 4, 1), Tiles(32, 64, 4, 1), Tiles(16, 32, 4, 1)),
    },
    "query_grad": {
        "sm_80": (Tiles(64, 64, 4, 2), Tiles(64, 64, 8, 2), Tiles(32, 32, 4, 1)),
        "sm_86": (Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2), Tiles(32, 32, 4, 1)),
        "sm_90": (Tiles(128, 64, 8, 2), Tiles(128, 64, 8, 2), Tiles(64, 32, 4, 1)),
        "sm_100": (Tiles(128, 64, 8, 2), Tiles(128, 64, 8, 2), Tiles(64, 32, 4, 1)),
        "gfx942": (Tiles(64, 32, 4, 1), Tiles(64, 32, 4, 1), Tiles(32, 16, 4, 1)),
    },
}
# float32 multiplies without tensor cores by default, with operands in registers: smaller tiles, alike everywhere.
_FLOAT32: dict[str, tuple[Tiles, ...]] = {
    "forward": (Tiles(64, 32, 8, 2), Tiles(32, 16, 4, 2), Tiles(32, 16, 8, 1)),
    "key_value_grad": (Tiles(32, 32, 4, 1), Tiles(16, 32, 4, 1), Tiles(16, 16, 4, 1)),
    "query_grad": (Tiles(32, 32, 4, 1), Tiles(32, 16, 4, 1), Tiles(16, 16, 4, 1)),
}
# A mask or bias is one more tile of scores in registers and, loaded ahead, in shared memory.
_DENSE: dict[str, tuple[Tiles, ...]] = {
    "forward": (Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2), Tiles(32, 32, 4, 2)),
    "key_value_grad": (Tiles(32, 64, 4, 2), Tiles(32, 32, 4, 2), Tiles(16, 32, 4, 1)),
    "query_grad": (Tiles(64, 32, 4, 2), Tiles(64, 32, 4, 2), Tiles(32, 16, 4, 1)),
}
# The interpreter has no limits; the two sizes differ, so that swapping rows and columns would be noticed.
_INTERPRETER = Tiles(32, 16, 1, 1)


def tiles_of(kernel: str, architecture: str, query: torch.Tensor, value: torch.Tensor, *, dense: bool = False) -> Tiles:
    """The tiles of `kernel` ("forward", "key_value_grad", "query_grad") for these head_dims and this dtype.

    dense: the call has a mask or a bias.
    """
    if architecture == "interpreter":
        return _INTERPRETER
    row = _DENSE[kernel] if dense else _TABLE[kernel][architecture]
    if query.dtype == torch.float32:
        row = _FLOAT32[kernel]
    tiles = row[_HEAD_DIMS.index(max(_HEAD_DIMS[0], padded_dim(max(query.shape[-1], value.shape[-1]))))]
    # two stages of a loaded mask fail to compile for AMD (Triton 3.9: "element type bit width must be a multiple of 8")
    return tiles._replace(num_stages=1) if architecture.startswith("gfx") else tiles


def padded_dim(dim: int) -> int:
    """The power of two, at least 16, that a kernel pads head_dim to."""
    return max(16, 1 << (dim - 1).bit_length())
