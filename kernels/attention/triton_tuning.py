"""Block sizes of the Triton kernels: a table, by architecture and by what a row of a head takes; never an autotuner.

An autotuner would time its candidates at the first call of every shape, differently on every rank, and a captured graph
could not hold it. docs/kernels/triton_flash.md gives what each entry takes of registers and shared memory.
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


# kernel -> architecture -> bytes of a padded head row (head_dim 64 in 16 bits is 128) -> tiles
_TABLE: dict[str, dict[str, dict[int, Tiles]]] = {
    "forward": {
        "sm_80": {
            128: Tiles(128, 64, 4, 3),
            256: Tiles(128, 64, 8, 3),
            512: Tiles(64, 32, 4, 2),
            1024: Tiles(32, 16, 4, 2),
        },
        "sm_86": {
            128: Tiles(128, 32, 4, 3),
            256: Tiles(64, 32, 4, 2),
            512: Tiles(32, 32, 4, 2),
            1024: Tiles(32, 16, 4, 1),
        },
        "sm_90": {
            128: Tiles(128, 128, 8, 3),
            256: Tiles(128, 64, 8, 3),
            512: Tiles(64, 64, 4, 2),
            1024: Tiles(32, 16, 4, 2),
        },
        "gfx942": {
            128: Tiles(128, 64, 4, 1),
            256: Tiles(128, 64, 4, 1),
            512: Tiles(64, 32, 4, 1),
            1024: Tiles(32, 16, 4, 1),
        },
    },
    "key_value_grad": {
        "sm_80": {
            128: Tiles(64, 64, 4, 2),
            256: Tiles(32, 64, 4, 2),
            512: Tiles(32, 32, 4, 1),
            1024: Tiles(16, 16, 4, 1),
        },
        "sm_86": {
            128: Tiles(32, 64, 4, 2),
            256: Tiles(32, 64, 8, 1),
            512: Tiles(16, 32, 4, 1),
            1024: Tiles(16, 16, 4, 1),
        },
        "sm_90": {
            128: Tiles(64, 128, 8, 2),
            256: Tiles(64, 64, 8, 2),
            512: Tiles(32, 64, 8, 1),
            1024: Tiles(16, 16, 4, 1),
        },
        "gfx942": {
            128: Tiles(32, 64, 4, 1),
            256: Tiles(32, 64, 4, 1),
            512: Tiles(16, 32, 4, 1),
            1024: Tiles(16, 16, 4, 1),
        },
    },
    "query_grad": {
        "sm_80": {
            128: Tiles(64, 64, 4, 2),
            256: Tiles(64, 32, 4, 2),
            512: Tiles(32, 32, 4, 1),
            1024: Tiles(16, 16, 4, 1),
        },
        "sm_86": {
            128: Tiles(64, 32, 4, 2),
            256: Tiles(64, 32, 8, 1),
            512: Tiles(32, 16, 4, 1),
            1024: Tiles(16, 16, 4, 1),
        },
        "sm_90": {
            128: Tiles(128, 64, 8, 2),
            256: Tiles(64, 64, 8, 2),
            512: Tiles(64, 32, 8, 1),
            1024: Tiles(16, 16, 4, 1),
        },
        "gfx942": {
            128: Tiles(64, 32, 4, 1),
            256: Tiles(64, 32, 4, 1),
            512: Tiles(32, 16, 4, 1),
            1024: Tiles(16, 16, 4, 1),
        },
    },
}
# Blackwell has the shared memory and registers of Hopper.
for _by_architecture in _TABLE.values():
    _by_architecture["sm_100"] = _by_architecture["sm_90"]
# The interpreter has no limits; two different sizes, so that rows and columns cannot be exchanged unnoticed.
_INTERPRETER = Tiles(32, 16, 1, 1)

# Shared memory a block may have, in bytes (CUDA C++ Programming Guide, table 30; AMD CDNA3 ISA, 1.1).
SHARED_MEMORY = {"sm_80": 166912, "sm_86": 101376, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}


@torch.compiler.assume_constant_result
def architecture_of(device: torch.device) -> str | None:
    """The row of the table for a device; None where the kernels cannot run."""
    if device.type == "cpu":
        return "interpreter"
    if torch.version.hip is not None:
        return "gfx942"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return None
    if (major, minor) in ((8, 0), (8, 7)):
        return "sm_80"
    # 8.6, 8.9 and 12.x have the least shared memory; so may what is not known yet
    return {9: "sm_90", 10: "sm_100"}.get(major, "sm_86")


def tiles_of(kernel: str, architecture: str, query: torch.Tensor, value: torch.Tensor) -> Tiles:
    """The tiles of `kernel` ("forward", "key_value_grad", "query_grad") for these head_dims and this dtype."""
    if architecture == "interpreter":
        return _INTERPRETER
    row = max(128, padded_dim(max(query.shape[-1], value.shape[-1])) * query.element_size())
    return _TABLE[kernel][architecture][row]


def padded_dim(dim: int) -> int:
    """The power of two, at least 16, that a kernel pads head_dim to."""
    return max(16, 1 << (dim - 1).bit_length())
