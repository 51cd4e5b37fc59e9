"""Where the rows of a dataset come from: files written before the first step, or a stream that is read as it goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from easytorch.training.config import TrainingConfig, flag
from easytorch.training.data import step_indices
from easytorch.training.examples import Examples
from easytorch.training.rows import Row, Rows, read_rows
from easytorch.training.task import Batch, Indices

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StoredRows:
    """Rows of `write_rows`, memory-mapped; the last `eval_fraction` of them are held out."""

    def __init__(self, folder: Path, config: TrainingConfig) -> None:
        self.arrays = read_rows(folder, config.block_size)
        count = len(next(iter(self.arrays.values())))
        self.eval_count = max(1, round(count * config.eval_fraction)) if config.eval_fraction else 0
        self.train_count = count - self.eval_count
        if self.train_count < 1:
            raise ValueError(
                f"{flag('dataset')} {config.dataset} makes {count} row(s) of {config.block_size} tokens, "
                f"{self.eval_count} of them held out: nothing is left to train on; give more examples, or a smaller "
                f"{flag('block_size')}"
            )

    def indices(self, step: int, batch_size: int, seed: int) -> np.ndarray:
        return step_indices(step, batch_size, self.train_count, seed)

    def sample(self, place: int) -> Indices:
        return [place % self.train_count]

    def rows(self, indices: Indices) -> Batch:
        chosen = np.asarray(indices, dtype=np.int64)
        return {name: torch.from_numpy(array[chosen].astype(np.int64)) for name, array in self.arrays.items()}

    def largest_token(self) -> int:
        return max(int(array.max()) for name, array in self.arrays.items() if name.endswith("input_ids"))

    def describe(self, block_size: int) -> str:
        return f"{self.train_count} rows of {block_size} tokens to train on, {self.eval_count} held out"

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The step says all."""


class StreamedRows:
    """Rows numbered as they come, epoch after epoch. Every process reads the stream and keeps the rows of one step.

    The place of a row is its epoch, its first example and how many tokens of that are in earlier rows.
    """

    train_count = eval_count = 0

    def __init__(self, config: TrainingConfig, tokenizer: PreTrainedTokenizerBase, examples: Examples) -> None:
        self._rows_of, self._examples = Rows(config, tokenizer), examples
        self._largest = max(tokenizer.get_vocab().values())
        self._held: dict[int, Row] = {}
        self._next, self._place = 0, (0, 0, 0)
        self._pulled = self._pull()

    def indices(self, step: int, batch_size: int, seed: int) -> np.ndarray:
        first = step * batch_size
        assert self._next == first or first in self._held
        for number in [number for number in self._held if number < first]:
            del self._held[number]
        self._hold(first + batch_size)
        return np.arange(first, first + batch_size)

    def sample(self, place: int) -> Indices:
        self._hold(self._next + 1) if not self._held else None
        return [min(self._held) + place % len(self._held)]

    def rows(self, indices: Indices) -> Batch:
        chosen = [self._held[int(number)] for number in indices]
        return {name: torch.from_numpy(np.stack([row[name] for row in chosen]).astype(np.int64)) for name in chosen[0]}

    def largest_token(self) -> int:
        return self._largest

    def describe(self, block_size: int) -> str:
        return f"a stream of rows of {block_size} tokens to train on, none held out"

    def state(self) -> dict[str, Any]:
        return {"row": self._next, "place": list(self._place)}

    def restore(self, state: Mapping[str, Any]) -> None:
        place = state.get("place")
        if not isinstance(place, list | tuple) or not all(
            type(one) is int and one >= 0 for one in (*place, state["row"])
        ):
            raise ValueError("it does not say where the stream was")
        self._next, self._place = state["row"], (place[0], place[1], place[2])
        self._held, self._pulled = {}, self._pull()

    def _hold(self, end: int) -> None:
        while self._next < end:
            self._held[self._next] = next(self._pulled)
            self._next += 1

    def _pull(self) -> Iterator[Row]:
        epoch, start, used = self._place
        while True:
            found = False
            for row, (number, taken) in self._rows_of.of(self._examples.read(epoch, start), start, used):
                found = True
                self._place = (epoch, number, taken) if number >= 0 else (epoch + 1, 0, 0)
                yield row
            if not found and start == 0:
                raise ValueError(f"{flag('dataset')} {self._examples.name} makes no row in an epoch")
            epoch, start, used = epoch + 1, 0, 0


Source = StoredRows | StreamedRows
