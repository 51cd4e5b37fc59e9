"""Attention dropout that is a function of (seed, position), so that every kernel, and backward, drops the same weights.

For batch b of B, query head h of H, query i, key j, with the hash of kernels/random/counter.py:

    keep = hash(seed, b * H + h, i, j) >= floor(dropout_prob * 2**32)
"""

from __future__ import annotations

import torch

from easytorch.kernels.random.counter import counter_hash


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
    head = torch.arange(batch * heads, device=device).reshape(batch, heads, 1, 1)
    row = torch.arange(first_row, first_row + rows, device=device).reshape(rows, 1)
    column = torch.arange(first_column, first_column + columns, device=device)
    hashed = counter_hash(torch.as_tensor(seed, device=device).to(torch.int64), head, row, column)
    return hashed >= threshold(dropout_prob)
