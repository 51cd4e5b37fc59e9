"""32 random bits from a seed and up to three coordinates.

In unsigned 32-bit arithmetic that wraps, for coordinates a, b, c:

    x = mix(seed ^ a * 0x9E3779B1)
    x = mix(x ^ b * 0x85EBCA77)
    x = mix(x ^ c * 0xC2B2AE3D)
    mix(x): x ^= x >> 16; x *= 0x7FEB352D; x ^= x >> 15; x *= 0x846CA68B; x ^= x >> 16

`mix` is Wellons' lowbias32 (https://nullprogram.com/blog/2018/07/31/). The seed is taken modulo 2**32.
"""

from __future__ import annotations

import torch

from easytorch.kernels.random.constants import COLUMN, HEAD, MIX, ROW

LOW = 0xFFFFFFFF  # torch has no uint32 arithmetic on every device: int64 with the upper half cleared


def counter_hash(seed: torch.Tensor, *coordinates: torch.Tensor) -> torch.Tensor:
    """seed and coordinates int64, broadcast against one another -> int64 in [0, 2**32)."""
    state = seed & LOW
    for coordinate, multiplier in zip(coordinates, (HEAD, ROW, COLUMN), strict=True):
        state = _mix(state ^ (coordinate * multiplier & LOW))
    return state


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ (x >> 16)) * MIX[0] & LOW
    x = (x ^ (x >> 15)) * MIX[1] & LOW
    return x ^ (x >> 16)
