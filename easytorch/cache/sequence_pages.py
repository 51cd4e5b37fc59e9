"""`SequencePages`: one sequence of a step over pages, for layers that must see its latents side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from easytorch.cache.ragged_pages import RaggedPagesCache


class SequencePages:
    """The cache of a layer that is given one sequence of a step: writes its tokens and gathers all of them.

    pages: those that hold its tokens [0, end), in order. slots (T,): the places of the given tokens in the pool.
    """

    def __init__(self, cache: RaggedPagesCache, pages: Sequence[int], end: int, slots: Tensor) -> None:
        self._cache, self._slots, self._end = cache, slots, end
        self._pages = torch.tensor(pages[: -(-end // cache.metadata.page_size)], device=cache.device)

    def update(self, latent: Tensor, key_rope: Tensor, layer_idx: int, **_: Any) -> tuple[Tensor, Tensor]:
        """latent (1, 1, T, L) and key_rope (1, 1, T, R), of the given tokens -> of all of them (1, 1, end, ...)."""
        latent_pages, rope_pages = self._cache.pools(layer_idx)
        latents = self._all_of_them(latent_pages[:, :, 0], latent[0, 0])
        return latents[None, None], self._all_of_them(rope_pages[:, :, 0], key_rope[0, 0])[None, None]

    def update_indexer(self, key: Tensor, layer_idx: int) -> Tensor:
        """key (1, T, C): the indexer's, of the given tokens -> of all of them (1, end, C)."""
        return self._all_of_them(self._cache.index_pages(layer_idx), key[0])[None]

    def _all_of_them(self, pool: Tensor, given: Tensor) -> Tensor:
        """pool (P, page_size, W), given (T, W) -> (end, W)."""
        pool.view(-1, pool.shape[-1])[self._slots] = given
        return pool[self._pages].flatten(0, 1)[: self._end]
