"""Block sizes of the kernels over pages: a table by architecture, head_dim and kind of batch; there is no
autotuning."""

from __future__ import annotations

from typing import NamedTuple

import torch

from easytorch.kernels.interop.triton_call import power_of_two


class Tiles(NamedTuple):
    """block_m rows (query heads of one key/value head, times tokens) by block_n keys, and how Triton compiles it."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# kind of batch -> architecture -> tiles for 16 bits, padded head_dim at most 64, 128, 256, 512. Decoding is bound by
# memory: few rows and many keys in flight. Chosen by compiling, since no GPU was at hand to time them: what fits shared
# memory and spills nothing, but for up to 264 bytes per thread at 512 from sm_90 on, whose tensor cores want 64 rows.
_HEAD_DIMS = (64, 128, 256, 512)
_TABLE: dict[str, dict[str, tuple[Tiles, ...]]] = {
    "decode": {
        "sm_80": (Tiles(16, 128, 4, 3), Tiles(16, 64, 4, 3), Tiles(16, 64, 4, 2), Tiles(16, 32, 4, 2)),
        "sm_86": (Tiles(16, 64, 4, 3), Tiles(16, 64, 4, 2), Tiles(16, 32, 4, 2), Tiles(16, 32, 4, 2)),
        "sm_90": (Tiles(16, 128, 4, 3), Tiles(16, 128, 4, 3), Tiles(16, 64, 4, 3), Tiles(64, 32, 8, 2)),
        "sm_100": (Tiles(16, 128, 4, 3), Tiles(16, 128, 4, 3), Tiles(16, 64, 4, 3), Tiles(64, 32, 8, 2)),
        "gfx942": (Tiles(16, 64, 4, 1), Tiles(16, 64, 4, 1), Tiles(16, 32, 4, 1), Tiles(16, 16, 4, 1)),
    },
    "prefill": {
        "sm_80": (Tiles(64, 64, 4, 3), Tiles(64, 32, 4, 2), Tiles(64, 32, 8, 2), Tiles(32, 32, 8, 2)),
        "sm_86": (Tiles(64, 64, 4, 3), Tiles(64, 32, 4, 2), Tiles(32, 32, 4, 2), Tiles(16, 32, 4, 2)),
        "sm_90": (Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 3), Tiles(64, 64, 8, 2), Tiles(64, 32, 8, 2)),
        "sm_100": (Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 3), Tiles(64, 64, 8, 2), Tiles(64, 32, 8, 2)),
        "gfx942": (Tiles(64, 32, 4, 1), Tiles(64, 32, 4, 1), Tiles(32, 32, 4, 1), Tiles(16, 16, 4, 1)),
    },
}
# float32 by default does not use tensor cores and keeps operands in registers: smaller tiles, for all architectures
_FLOAT32: dict[str, tuple[Tiles, ...]] = {
    "decode": (Tiles(16, 32, 4, 2), Tiles(16, 32, 8, 2), Tiles(16, 16, 4, 1), Tiles(16, 16, 8, 1)),
    "prefill": (Tiles(32, 32, 8, 2), Tiles(32, 16, 8, 2), Tiles(16, 16, 4, 1), Tiles(16, 16, 8, 1)),
}
# for the interpreter: two different sizes, so that exchanged rows and columns are noticed
_INTERPRETER = Tiles(16, 32, 1, 1)

MAX_HEAD_DIM = _HEAD_DIMS[-1]
MAX_SPLITS = 64
_LEAST_KEYS = 512  # keys per split: with fewer, combining the splits costs more than it hides


def tiles_of(architecture: str, dtype: torch.dtype, dim: int, *, decode: bool) -> Tiles:
    """The tiles for head_dim `dim`, the widest of query and value."""
    if architecture == "interpreter":
        return _INTERPRETER
    kind = "decode" if decode else "prefill"
    row = _FLOAT32[kind] if dtype == torch.float32 else _TABLE[kind][architecture]
    return row[_HEAD_DIMS.index(max(_HEAD_DIMS[0], power_of_two(dim)))]


def splits_of(programs: int, keys: int, processors: int) -> int:
    """A power of two: how many parts the keys of a sequence are split into, where there is one program per tile of
    rows.

    programs: those that have rows; keys: the most a sequence can have. Two programs keep a multiprocessor busy.
    """
    splits = 1
    while splits < MAX_SPLITS and programs * splits < 2 * processors and keys >= 2 * splits * _LEAST_KEYS:
        splits *= 2
    return splits
