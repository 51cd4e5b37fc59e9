"""`RaggedStep`: one forward over tokens of many requests, whose keys and values are in the pages of a pool."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from easytorch.cache.page_slots import Pages, fit
from easytorch.cache.ragged_pages import RaggedPagesCache
from easytorch.cache.sequence_pages import SequencePages
from easytorch.cache.state_slots import SequenceStates, StateSlots
from easytorch.kernels.decoder_step.native import PageSlots
from easytorch.kernels.ragged_page.write import write_pages
from easytorch.operations import OperationRegistry

_ATTENTION = OperationRegistry.create("ragged_page_attention")
_LATENT_ATTENTION = OperationRegistry.create("ragged_page_multi_latent_attention")


class Chunk(NamedTuple):
    """Tokens [start, end) of a sequence. pages: those of the pool that hold its tokens [0, end), in order. slot: the
    index of its recurrent states."""

    pages: Sequence[int]
    start: int
    end: int
    slot: int = 0


class RaggedStep:
    """The cache of a forward over one row (1, N) of packed chunks, their tokens in order.

    Each layer writes the keys and values of all chunks to the pages before it attends to any, so a sequence may share
    pages of a common prefix that another sequence of the same call fills.
    Where a model attends within chunks, each chunk is a sequence of its own, whose pages are a part of the sequence's;
    page_size divides its size.
    positions (1, N): the tokens' places in their sequences. slots (N,): their places in the pool.
    states: of recurrent layers, if the model has any.
    """

    def __init__(self, cache: RaggedPagesCache, chunks: Sequence[Chunk], states: StateSlots | None = None) -> None:
        self._cache = cache
        self._batches = [] if states is None else _recurrent_batches(states, chunks, cache.device)
        device, size = cache.device, cache.metadata.page_size
        positions: list[int] = []
        slots: list[int] = []
        for pages, start, end, _ in chunks:
            places = range(start, end)
            positions += places
            slots += [pages[place // size] * size + place % size for place in places]
        self.positions = torch.tensor([positions], device=device)
        self.slots = torch.tensor(slots, device=device)
        self._chunks = chunks
        self._tables: dict[int | None, tuple[Tensor, Tensor, Tensor]] = {None: _tables(chunks, device)}

    def attend_pages(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        layer_idx: int,
        chunk_size: int | None = None,
        **features: Any,
    ) -> Tensor:
        """Writes key and value (1, K, N, D) and attends to the pages: query (1, H, N, D) -> (1, N, H, Dv).

        key and value: None to attend to what this step has written for the layer. chunk_size: a token sees those of its
        chunk of so many tokens alone.
        """
        if chunk_size not in self._tables:
            assert chunk_size is not None
            self._tables[chunk_size] = self._tables_within(chunk_size)
        key_pages, value_pages = self._cache.pools(layer_idx)
        if key is not None and value is not None:
            write_pages(key_pages, value_pages, key[0].transpose(0, 1), value[0].transpose(0, 1), self.slots)
        output = _ATTENTION(
            query[0].transpose(0, 1), key_pages, value_pages, *self._tables[chunk_size], **features
        )  # fmt: skip
        attended: Tensor = output.attention_outputs[None]
        return attended

    def page_slots(
        self, layer_idx: int, rows: int, length: int, dtype: torch.dtype, sizes: tuple[int, int]
    ) -> Pages | None:
        """Where the keys and values of the step's tokens go, and what each sees, for one operator that writes and
        attends: `rows` of `length` tokens, keys and values of `sizes` (heads, head_dim). None: not in these pages."""
        pools = self._cache.pools(layer_idx)
        if rows != 1 or length != len(self.slots) or not fit(pools, dtype, sizes):
            return None
        return Pages(PageSlots(*pools, self.slots, *self._tables[None]))

    def _tables_within(self, chunk_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """The tables of attention within chunks of `chunk_size` tokens."""
        parts = _within_chunks(self._chunks, chunk_size, self._cache.metadata.page_size)
        return _tables(parts, self._cache.device)

    def attend_latents(
        self,
        query: Tensor,
        query_rope: Tensor,
        latent: Tensor,
        key_rope: Tensor,
        up_key: Tensor,
        up_value: Tensor,
        layer_idx: int,
        **features: Any,
    ) -> Tensor:
        """Writes latent (1, 1, N, L) and key_rope (1, 1, N, R) and attends to the pages: query (1, N, H, Dn) and
        query_rope (1, N, H, R) -> (1, N, H, Dv). up_key (H, Dn, L) and up_value (H, Dv, L) expand a latent."""
        latent_pages, rope_pages = self._cache.pools(layer_idx)
        write_pages(latent_pages, rope_pages, latent[0].transpose(0, 1), key_rope[0].transpose(0, 1), self.slots)
        output = _LATENT_ATTENTION(
            query[0], query_rope[0], (latent_pages[:, :, 0], rope_pages[:, :, 0]), *self._tables[None], None,
            up_key, up_value, **features,
        )  # fmt: skip
        attended: Tensor = output.attention_outputs[None]
        return attended

    def map_latents(
        self,
        run: Callable[[Tensor, tuple[Tensor, Tensor], Tensor, SequencePages], Tensor],
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Runs a layer that chooses among a sequence's latents on each sequence, in order: one may read pages of a
        common prefix that an earlier one fills.

        run: hidden_states (1, T, D), cos and sin (1, T, R), mask (1, 1, T, S) and the sequence's pages -> (1, T, D).
        hidden_states (1, N, D) and position_embeddings (1, N, R) -> (1, N, D).
        """
        outputs, place = [], 0
        for pages, start, end, _ in self._chunks:
            columns = slice(place, place + end - start)
            cos, sin = position_embeddings
            mask = torch.ones(end - start, end, dtype=torch.bool, device=hidden_states.device).tril(start)
            own = SequencePages(self._cache, pages, end, self.slots[columns])
            outputs.append(run(hidden_states[:, columns], (cos[:, columns], sin[:, columns]), mask[None, None], own))
            place = columns.stop
        return torch.cat(outputs, dim=1)

    def map_sequences(self, run: Callable[[Tensor, SequenceStates], Tensor], hidden_states: Tensor) -> Tensor:
        """Runs a recurrent layer on each sequence; all sequences of one token are one batch.

        run: hidden_states (B, T, D) of sequences and their states -> (B, T, D). hidden_states (1, N, D) -> (1, N, D).
        """
        outputs: Tensor | None = None
        for rows, columns, states in self._batches:
            given = hidden_states[0, columns].unflatten(0, (rows, -1))
            output = run(given, states).flatten(0, 1)
            if outputs is None:
                outputs = output.new_empty(1, hidden_states.shape[1], output.shape[-1])
            outputs[0, columns] = output
        assert outputs is not None
        return outputs


def _tables(chunks: Sequence[Chunk], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """`ragged_page_attention`'s context_lens (B,), block_tables (B, pages) and query_start_loc (B + 1,)."""
    longest = max(len(chunk.pages) for chunk in chunks)
    pages = [[*chunk.pages, *(0 for _ in range(longest - len(chunk.pages)))] for chunk in chunks]
    ends = [chunk.end for chunk in chunks]
    starts = [0, *itertools.accumulate(chunk.end - chunk.start for chunk in chunks)]
    lens, tables, places = (torch.tensor(one, dtype=torch.int32, device=device) for one in (ends, pages, starts))
    return lens, tables, places


class DecodeStep(RaggedStep):
    """`RaggedStep` of one token of each of B sequences that have earlier ones, with all it knows on the device.

    rows (B, 3 + pages) int64: the token's position, its slot in the pool (-1: it is not kept), the slot of its states,
    and the pages of its sequence. Its shapes are the same whatever the sequences, and no value is read.
    """

    def __init__(self, cache: RaggedPagesCache, rows: Tensor, states: StateSlots | None = None) -> None:
        self._cache, self._chunks = cache, ()
        position, self.slots, pages = rows[:, 0], rows[:, 1], rows[:, 3:]
        self.positions = position[None]
        self._starts = torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device)
        self._tables = {None: ((position + 1).int(), pages.int(), self._starts)}
        self._batches = []
        if states is not None:
            own = SequenceStates(states, rows[:, 2], cache.device, has_initial_states=True)
            self._batches.append((len(rows), slice(0, len(rows)), own))

    def _tables_within(self, chunk_size: int) -> tuple[Tensor, Tensor, Tensor]:
        size = self._cache.metadata.page_size
        _check_chunks(chunk_size, size)
        _, pages, _ = self._tables[None]
        position = self.positions[0]
        first = position // chunk_size * chunk_size  # of the token's chunk
        columns = (first // size)[:, None] + torch.arange(chunk_size // size, device=pages.device)
        own = pages.gather(1, columns.clamp(max=pages.shape[1] - 1))
        return (position - first + 1).int(), own, self._starts


def _check_chunks(size: int, page_size: int) -> None:
    if size % page_size:
        raise ValueError(f"page_size={page_size} must divide the {size} tokens of the model's chunks of attention")


def _within_chunks(chunks: Sequence[Chunk], size: int, page_size: int) -> list[Chunk]:
    """The parts of `chunks` between multiples of `size`, each a sequence that begins at one."""
    _check_chunks(size, page_size)
    parts = []
    for pages, start, end, slot in chunks:
        for first in range(start // size * size, end, size):
            last = min(end, first + size)
            of_part = pages[first // page_size : -(-last // page_size)]
            parts.append(Chunk(of_part, max(start - first, 0), last - first, slot))
    return parts


def _recurrent_batches(
    states: StateSlots, chunks: Sequence[Chunk], device: torch.device
) -> list[tuple[int, Tensor | slice, SequenceStates]]:
    """The calls of a recurrent layer: (batch size, positions of the tokens in the step, states)."""
    batches: list[tuple[int, Tensor | slice, SequenceStates]] = []
    single: list[tuple[int, int]] = []
    place = 0
    for chunk in chunks:
        count = chunk.end - chunk.start
        if count == 1 and chunk.start > 0:
            single.append((place, chunk.slot))
        else:
            own = SequenceStates(states, [chunk.slot], device, has_initial_states=chunk.start > 0)
            batches.append((1, slice(place, place + count), own))
        place += count
    if single:
        places, slots = zip(*single, strict=True)
        rows = torch.tensor(places, device=device)
        batches.append((len(single), rows, SequenceStates(states, slots, device, has_initial_states=True)))
    return batches
