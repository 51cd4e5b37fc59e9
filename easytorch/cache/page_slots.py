"""Where tokens go in the pages of a cache, for one operator that writes their keys and values and attends."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from easytorch.kernels.decoder_step.native import PageSlots


class Pages(NamedTuple):
    """The slots, and what the cache is to do when they have been written."""

    slots: PageSlots
    done: Callable[[], None] | None = None

    def written(self) -> None:
        """Called when the slots have been written."""
        if self.done is not None:
            self.done()


def fit(pools: tuple[Tensor, Tensor], dtype: torch.dtype, sizes: tuple[int, int]) -> bool:
    """Whether the pages (P, page_size, K, D) are on the CPU and of this dtype and these heads and head_dim."""
    return all(pool.dtype is dtype and pool.is_cpu and tuple(pool.shape[2:]) == sizes for pool in pools)
