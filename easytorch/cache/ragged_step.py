"""`RaggedStep`: one call of a model for tokens of many requests, whose keys and values lie in the pages of a pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from easytorch.cache.ragged_pages import RaggedPagesCache
from easytorch.kernels.ragged_page.write import write_pages
from easytorch.operations import OperationRegistry

_ATTENTION = OperationRegistry.create("ragged_page_attention")


class Chunk(NamedTuple):
    """Tokens [start, end) of a sequence. pages: those of the pool that hold its tokens [0, end), in order."""

    pages: Sequence[int]
    start: int
    end: int


class RaggedStep:
    """What a native model takes as `past_key_values` in a call of one row (1, N): the tokens of the chunks, in order.

    Each layer's keys and values are written to the pages first, those of all chunks, and then attended to. So a
    sequence may have pages that another one of the same call fills: both begin with the same tokens.
    positions (1, N): the tokens' places in their sequences. slots (N,): their places in the pool.
    """

    def __init__(self, cache: RaggedPagesCache, chunks: Sequence[Chunk]) -> None:
        self._cache = cache
        device, size = cache.device, cache.metadata.page_size
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for pages, start, end in chunks:
            places = range(start, end)
            positions += places
            slots += [pages[place // size] * size + place % size for place in places]
            starts.append(starts[-1] + end - start)
        longest = max(len(chunk.pages) for chunk in chunks)
        tables = [[*chunk.pages, *(0 for _ in range(longest - len(chunk.pages)))] for chunk in chunks]
        self.positions = torch.tensor([positions], device=device)
        self.slots = torch.tensor(slots, device=device)
        self._starts = torch.tensor(starts, dtype=torch.int32, device=device)
        self._context_lens = torch.tensor([chunk.end for chunk in chunks], dtype=torch.int32, device=device)
        self._block_tables = torch.tensor(tables, dtype=torch.int32, device=device)

    def attend_pages(self, query: Tensor, key: Tensor, value: Tensor, layer_idx: int, **features: Any) -> Tensor:
        """Writes key and value (1, K, N, D) and attends to the pages: query (1, H, N, D) -> (1, N, H, Dv)."""
        key_pages, value_pages = self._cache.pools(layer_idx)
        write_pages(key_pages, value_pages, key[0].transpose(0, 1), value[0].transpose(0, 1), self.slots)
        output = _ATTENTION(
            query[0].transpose(0, 1), key_pages, value_pages, self._context_lens, self._block_tables, self._starts,
            **features,
        )  # fmt: skip
        attended: Tensor = output.attention_outputs[None]
        return attended
