"""The engine's decode steps as CUDA graphs: one for each padded number of sequences and of pages.

A step of prompts has another number of tokens every time and runs eagerly; so does the first step of each size, which
compiles and tunes what the capture records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from easytorch.cache import Chunk, DecodeStep, RaggedPagesCache, StateSlots
from easytorch.layers.captured_step import CapturedStep
from easytorch.layers.cuda_graph import GraphPool, graph_of
from easytorch.layers.model_snapshot import ModelSnapshot, capture_refusal
from easytorch.layers.sparse_indexer import SparseLatentAttention

# Sequences of the largest step that is captured, as in nano-vllm and vLLM; larger ones are bound by the device.
MOST_ROWS = 512
_LEAST_PAGES = 16
_TOKEN, _FIELDS = 1, 3  # columns before the pages: the token, and `DecodeStep`'s


def padded_rows(count: int) -> int:
    """1, 2, 4, 8, then multiples of 16."""
    return 1 << (count - 1).bit_length() if count <= 8 else -(-count // 16) * 16


def padded_pages(count: int, most: int) -> int:
    """A power of two, so that a long sequence meets few sizes; at most `most`, those of the longest sequence."""
    return min(most, max(_LEAST_PAGES, 1 << (count - 1).bit_length()))


class DecodeGraphs:
    """Decode steps over the pages of `cache`. `reason`: why they are not captured; None where they are.

    states: with one slot more than requests, the last, which the rows of padding write to. masks: of a step over pages.
    """

    def __init__(
        self,
        model: Any,
        cache: RaggedPagesCache,
        states: StateSlots | None,
        masks: Mapping[str, None] | None,
        cache_name: str,
        *,
        enforce_eager: bool = False,
    ) -> None:
        self._model, self._cache, self._states = model, cache, states
        self._masks, self._cache_name = masks, cache_name
        self._eager = "enforce_eager=True" if enforce_eager else None
        self._device: torch.device = cache.device
        self.reason: str | None = None
        self.replays = 0
        self._renew()

    def _renew(self) -> None:
        """Forgets every graph: at first, and when the model is no longer what was captured."""
        self._steps: dict[tuple[int, int], tuple[CapturedStep[Tensor], Tensor]] = {}
        self._pool = GraphPool()
        self._snapshot: ModelSnapshot | None = None
        self.reason = self._eager
        if self.reason is None and graph_of(self._device, self._pool) is None:
            self.reason = f"steps on {self._device.type} are not captured"
        self._fixed = self.reason is not None  # whatever becomes of the model
        if self.reason is None:
            self._snapshot = ModelSnapshot(self._model)
            self.reason = capture_refusal(self._model)
        if self.reason is None and any(isinstance(one, SparseLatentAttention) for one in self._model.modules()):
            self.reason = "its layers choose among the latents of one sequence after the other"

    def logits(self, chunks: Sequence[Chunk], tokens: Sequence[int]) -> Tensor | None:
        """(B, vocabulary) after one token of each of B sequences; None where an eager step is to run.

        They are valid until the next call.
        """
        if self._fixed or len(chunks) > MOST_ROWS or any(one.start == 0 or one.end - one.start > 1 for one in chunks):
            return None
        if self._snapshot is not None and not self._snapshot.holds():
            self._renew()
        if self.reason is not None:
            return None
        metadata = self._cache.metadata
        most = max(metadata.max_num_pages_per_req, *(len(one.pages) for one in chunks))
        size = padded_rows(len(chunks)), padded_pages(max(len(one.pages) for one in chunks), most)
        if size not in self._steps:
            rows = torch.zeros(size[0], _TOKEN + _FIELDS + size[1], dtype=torch.int64, device=self._device)
            self._steps[size] = CapturedStep(self._run(rows), self._device, self._pool), rows
        step, rows = self._steps[size]
        rows.copy_(self._padded(chunks, tokens, size), non_blocking=True)
        found = step()
        if step.refusal is not None:
            self.reason = step.refusal
        self.replays += step.captured
        return found[: len(chunks)]

    def _run(self, rows: Tensor) -> Callable[[], Tensor]:
        def run() -> Tensor:
            step = DecodeStep(self._cache, rows[:, _TOKEN:], self._states)
            output = self._model(
                input_ids=rows[:, 0][None], position_ids=step.positions, attention_mask=self._masks, use_cache=True,
                **{self._cache_name: step},
            )  # fmt: skip
            logits: Tensor = output.logits[0]
            return logits

        return run

    def _padded(self, chunks: Sequence[Chunk], tokens: Sequence[int], size: tuple[int, int]) -> Tensor:
        """The rows of a step, on the host. One of padding attends to the first token of page 0 and keeps nothing."""
        page_size, spare = self._cache.metadata.page_size, 0 if self._states is None else self._states.count - 1
        made = []
        for (pages, start, _, slot), token in zip(chunks, tokens, strict=True):
            place = -1  # a model of states alone has no pages to write to
            if self._cache.metadata.layers:
                place = pages[start // page_size] * page_size + start % page_size
            made.append([token, start, place, max(slot, 0), *pages, *(0 for _ in range(size[1] - len(pages)))])
        made += [[0, 0, -1, spare, *(0 for _ in range(size[1]))]] * (size[0] - len(made))
        rows = torch.tensor(made)
        return rows.pin_memory() if self._device.type == "cuda" else rows
