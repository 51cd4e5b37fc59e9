"""Tokenized text in blocks of fixed length, and the blocks that each process sees at each step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from easytorch.training.config import flag

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_texts(paths: Sequence[str]) -> list[str]:
    """The documents; an empty file is an error, as is one that is not UTF-8."""
    texts = []
    for path in paths:
        if Path(path).is_dir():
            raise IsADirectoryError(f"{flag('text')}: {path} is a folder; name the files in it")
        if not Path(path).exists():
            raise FileNotFoundError(f"{flag('text')}: there is no file {path!r}")
        try:
            texts.append(Path(path).read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{flag('text')}: {path} is not UTF-8 text: {error}") from error
        if not texts[-1].strip():
            raise ValueError(f"{flag('text')}: {path} has no text to train on")
    return texts


def tokenize(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """The token ids of all documents, an end-of-text after each, as one int32 array."""
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no end-of-text (eos) token to put between documents")
    ids: list[int] = []
    for text in texts:
        ids += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        ids.append(tokenizer.eos_token_id)
    return np.asarray(ids, dtype=np.int32)


def split_blocks(tokens: int, block_size: int, eval_fraction: float) -> tuple[int, int]:
    """(training blocks, held-out blocks) of a number of tokens; `ValueError` where no training block is left."""
    count = tokens // block_size
    held_out = max(1, round(count * eval_fraction)) if eval_fraction else 0
    if count - held_out < 1:
        raise ValueError(
            f"{flag('text')} has {tokens} tokens, which is {count} blocks of {block_size}, {held_out} of them held "
            f"out: nothing is left to train on; use more text or a smaller {flag('block_size')}"
        )
    return count - held_out, held_out


class TokenBlocks:
    """A token stream as blocks of `block_size`; the last `eval_fraction` of them are held out.

    The file is memory-mapped, so a process holds only the batches it asks for. Tokens after the last whole block are
    not used.
    """

    def __init__(self, path: Path, block_size: int, eval_fraction: float) -> None:
        tokens = np.load(path, mmap_mode="r")
        self.train_count, self.eval_count = split_blocks(len(tokens), block_size, eval_fraction)
        count = self.train_count + self.eval_count
        self.blocks = tokens[: count * block_size].reshape(count, block_size)

    def largest_token(self) -> int:
        return int(self.blocks.max())

    def batch(self, indices: Sequence[int] | np.ndarray) -> torch.Tensor:
        """(N,) block numbers -> (N, block_size) int64 token ids. Held-out blocks follow the training ones."""
        return torch.from_numpy(self.blocks[np.asarray(indices, dtype=np.int64)].astype(np.int64))


def step_indices(step: int, batch_size: int, train_count: int, seed: int) -> np.ndarray:
    """The blocks of step `step`, over all processes: (batch_size,).

    Each epoch is a permutation of its own, a function of (seed, epoch) alone, so a resumed run and a run with another
    number of processes see the same blocks at the same step.
    """
    positions = np.arange(step * batch_size, (step + 1) * batch_size)
    epochs = positions // train_count
    orders = {epoch: np.random.default_rng((seed, epoch)).permutation(train_count) for epoch in np.unique(epochs)}
    return np.asarray(
        [orders[epoch][position % train_count] for epoch, position in zip(epochs, positions, strict=True)]
    )
