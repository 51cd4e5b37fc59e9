"""Examples as rows of `block_size` tokens: conversations packed or padded, pairs of answers, running text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from easytorch.training.chat import IGNORED, Tokens, answer_tokens, preference_tokens
from easytorch.training.config import TrainingConfig, flag
from easytorch.training.examples import Example, need_columns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = dict[str, np.ndarray]  # name -> (block_size,), int32

PADDING = -1  # the segment of padding


@dataclass
class Counts:
    """Examples that were cut at `block_size`, and those left out: of which no answer is left then, or preferences whose
    chosen and rejected are the same, and teach nothing."""

    examples: int = 0
    cut: int = 0
    dropped: int = 0
    ties: int = 0

    def note(self) -> str:
        notes = []
        if self.cut or self.dropped:
            notes.append(
                f"of {self.examples} examples {self.cut} are cut at {flag('block_size')}, and {self.dropped} are left "
                "out: nothing of an answer is left"
            )
        if self.ties:
            notes.append(f"of {self.examples} preferences {self.ties} are left out: chosen and rejected are the same")
        return "; ".join(notes)


@dataclass
class Rows:
    """Rows of examples, and behind each the place from which the next row is made: (example, tokens of it used)."""

    config: TrainingConfig
    tokenizer: PreTrainedTokenizerBase
    counts: Counts = field(default_factory=Counts)

    def of(self, examples: Iterable[Example], start: int = 0, used: int = 0) -> Iterator[tuple[Row, tuple[int, int]]]:
        """examples: from number `start` on, of which the first `used` tokens are in earlier rows."""
        make: Callable[..., Iterator[tuple[Row, tuple[int, int]]]] = {
            "pretrain": self._text, "sft": self._answers, "dpo": self._pairs,
        }[self.config.task]  # fmt: skip
        yield from make(enumerate(examples, start), used)

    def _text(self, examples: Iterator[tuple[int, Example]], used: int) -> Iterator[tuple[Row, tuple[int, int]]]:
        size, eos = self.config.block_size, self.tokenizer.eos_token_id
        held: list[int] = []
        for number, example in examples:
            need_columns(example, self._place(number), "text")
            ids = [*self.tokenizer(example["text"], add_special_tokens=False, verbose=False)["input_ids"], eos]
            self.counts.examples += 1
            place, used = used, 0
            while place < len(ids):
                taken = ids[place : place + size - len(held)]
                held += taken
                place += len(taken)
                if len(held) == size:
                    tokens = np.asarray(held, dtype=np.int32)
                    held = []
                    yield {"input_ids": tokens, "labels": tokens}, (number, place)

    def _answers(self, examples: Iterator[tuple[int, Example]], used: int) -> Iterator[tuple[Row, tuple[int, int]]]:
        size, held = self.config.block_size, list[Tokens]()
        for number, example in examples:
            tokens = self._cut(answer_tokens(example, self.tokenizer, self._place(number)))
            self.counts.examples += 1
            if tokens is None:
                continue
            if held and (not self.config.packing or sum(len(ids) for ids, _ in held) + len(tokens[0]) > size):
                yield _packed(held, size), (number, 0)
                held = []
            held.append(tokens)
        if held:
            yield _packed(held, size), (-1, 0)

    def _pairs(self, examples: Iterator[tuple[int, Example]], used: int) -> Iterator[tuple[Row, tuple[int, int]]]:
        size = self.config.block_size
        for number, example in examples:
            found = preference_tokens(example, self.tokenizer, self._place(number))
            self.counts.examples += 1
            if found[0] == found[1]:  # its margin is zero whatever the model
                self.counts.ties += 1
                continue
            chosen, rejected = map(self._cut, found)
            if chosen is None or rejected is None:
                continue
            row: Row = {}
            for name, tokens in (("chosen", chosen), ("rejected", rejected)):
                one = _packed([tokens], size)
                row |= {f"{name}_{key}": value for key, value in one.items() if key != "segment_ids"}
            yield row, (number + 1, 0)

    def _place(self, number: int) -> str:
        """An example's place, as errors name it."""
        return f"{self.config.dataset}, example {number + 1}"

    def _cut(self, tokens: Tokens) -> Tokens | None:
        ids, labels = tokens
        size = self.config.block_size
        if len(ids) > size:
            ids, labels = ids[:size], labels[:size]
            self.counts.cut += 1
        # the first token of a sequence is predicted by none
        if all(one == IGNORED for one in labels[1:]):
            self.counts.dropped += 1
            return None
        return ids, [IGNORED, *labels[1:]]


def _packed(held: list[Tokens], size: int) -> Row:
    row = {
        "input_ids": np.zeros(size, np.int32),
        "labels": np.full(size, IGNORED, np.int32),
        "segment_ids": np.full(size, PADDING, np.int32),
    }
    place = 0
    for segment, (ids, labels) in enumerate(held):
        end = place + len(ids)
        for name, values in (("input_ids", ids), ("labels", labels), ("segment_ids", segment)):
            row[name][place:end] = values
        place = end
    return row


def write_rows(folder: Path, rows: Iterable[Row]) -> int:
    """Append each row to `<folder>/<name>.int32`; returns their number."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.int32"):
        old.unlink()
    files: dict[str, Any] = {}
    count = 0
    try:
        for row in rows:
            if not files:
                files = {name: (folder / f"{name}.int32").open("wb") for name in row}
            for name, values in row.items():
                values.astype(np.int32).tofile(files[name])
            count += 1
    finally:
        for file in files.values():
            file.close()
    return count


def read_rows(folder: Path, block_size: int) -> dict[str, np.ndarray]:
    """Name -> (rows, block_size), memory-mapped."""
    files = sorted(folder.glob("*.int32"))
    return {path.stem: np.memmap(path, np.int32, "r").reshape(-1, block_size) for path in files}
