"""Block sizes of the Triton decode kernels and the number of splits: tables by architecture, without autotuning."""

from __future__ import annotations

from typing import NamedTuple

import torch

from easytorch.kernels.interop.triton_call import power_of_two


class Tiles(NamedTuple):
    """block_n keys a step, and how Triton compiles the kernel."""

    block_n: int
    num_warps: int
    num_stages: int


# 16 bits, padded head_dim at most 64, 128, 256: two programs of a multiprocessor load two or three blocks ahead
_HEAD_DIMS = (64, 128, 256)
_TABLE: dict[str, tuple[Tiles, ...]] = {
    "sm_80": (Tiles(128, 4, 3), Tiles(64, 4, 3), Tiles(32, 4, 3)),
    "sm_86": (Tiles(64, 4, 3), Tiles(32, 4, 3), Tiles(32, 4, 2)),
    "sm_90": (Tiles(128, 4, 3), Tiles(64, 4, 3), Tiles(32, 4, 3)),
    "sm_100": (Tiles(128, 4, 3), Tiles(64, 4, 3), Tiles(32, 4, 3)),
    "gfx942": (Tiles(128, 4, 1), Tiles(64, 4, 1), Tiles(32, 4, 1)),
}
_FLOAT32 = (Tiles(32, 4, 2), Tiles(16, 4, 2), Tiles(16, 4, 2))
# The interpreter has no limits; small, so that a short cache has many blocks.
_INTERPRETER = Tiles(16, 1, 1)

BLOCK_M = 64  # the most heads of a program; those that share a key/value head are rarely more
MAX_SPLITS = 64
MIN_BLOCKS = 4  # blocks of keys that make a split worth its partial result
PROGRAMS = 2  # programs that a multiprocessor runs at once


def tiles_of(architecture: str, query: torch.Tensor, value: torch.Tensor) -> Tiles:
    if architecture == "interpreter":
        return _INTERPRETER
    row = _FLOAT32 if query.dtype == torch.float32 else _TABLE[architecture]
    widest = power_of_two(max(query.shape[-1], value.shape[-1]))
    tiles = row[_HEAD_DIMS.index(max(_HEAD_DIMS[0], widest))]
    return tiles._replace(num_stages=1) if architecture.startswith("gfx") else tiles


def rows_of_group(group: int) -> int:
    """The heads of a program: tl.dot takes at least 16 rows."""
    return min(BLOCK_M, power_of_two(group))


def splits_of(heads: int, keys: int, block_n: int, processors: int) -> int:
    """The number of splits of the keys, where `heads` programs would read all of them."""
    wanted = -(-PROGRAMS * processors // max(heads, 1))
    return max(1, min(wanted, MAX_SPLITS, keys // (MIN_BLOCKS * block_n)))
