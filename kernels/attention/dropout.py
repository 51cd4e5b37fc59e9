"""Attention dropout that is a function of (seed, position), so that every kernel, and backward, drops the same weights.

For batch b of B, query head h of H, query i, key j, in unsigned 32-bit arithmetic that wraps:

    x = mix(seed ^ (b * H + h) * 0x9E3779B1)
    x = mix(x ^ i * 0x85EBCA77)
    x = mix(x ^ j * 0xC2B2AE3D)
    keep = x >= floor(dropout_prob * 2**32)
    mix(x): x ^= x >> 16; x *= 0x7FEB352D; x ^= x >> 15; x *= 0x846CA68B; x ^= x >> 16

`mix` is Wellons' lowbias32 (https://nullprogram.com/blog/2018/07/31/). The seed is taken modulo 2**32.
"""

from __future__ import annotations

import torch

from easytorch.kernels.attention.dropout_constants import COLUMN, HEAD, MIX, ROW

_LOW = 0xFFFFFFFF  # torch has no uint32 arithmetic on every device: int64 with the upper half cleared


def draw_seed() -> torch.Tensor:
    """A seed from torch's default generator: int64, shape (), on the CPU."""
    return torch.randint(0, 2**31 - 1, (), dtype=torch.int64)


def threshold(dropout_prob: float) -> int:
    """The smallest hash that is kept."""
    return int(dropout_prob * 2**32)


def keep_mask(
    seed: int | torch.Tensor,
    dropout_prob: float,
    shape: tuple[int, int, int, int],
    device: torch.device,
    *,
    first_row: int = 0,
    first_column: int = 0,
) -> torch.Tensor:
    """Boolean (B, H, T, S): True where a weight is kept. A block of a larger matrix names its first row and column."""
    batch, heads, rows, columns = shape
    state = torch.as_tensor(seed, device=device).to(torch.int64) & _LOW
    head = torch.arange(batch * heads, device=device).reshape(batch, heads, 1, 1)
    state = _mix(state ^ (head * HEAD & _LOW))
    state = _mix(state ^ (torch.arange(first_row, first_row + rows, device=device).reshape(rows, 1) * ROW & _LOW))
    state = _mix(state ^ (torch.arange(first_column, first_column + columns, device=device) * COLUMN & _LOW))
    return state >= threshold(dropout_prob)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ (x >> 16)) * MIX[0] & _LOW
    x = (x ^ (x >> 15)) * MIX[1] & _LOW
    return x ^ (x >> 16)
