"""What a run trains on and its loss, as the loop sees it: rows by their numbers, in batches of named tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from easytorch.training.data import TokenBlocks, step_indices

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Batch = dict[str, Tensor]  # name -> (N, ...), a row of the data each
Indices = Sequence[int] | np.ndarray


class Task(ABC):
    """The rows that a run trains on, those that are held out, and the loss of a batch of them.

    train_count, eval_count: rows of each kind; the held-out ones are numbered after the others.
    """

    train_count: int
    eval_count: int

    def indices(self, step: int, batch_size: int, seed: int) -> np.ndarray:
        """(batch_size,): the rows of step `step`, over all processes."""
        return step_indices(step, batch_size, self.train_count, seed)

    def sample(self, place: int) -> Indices:
        """One training row, another for each of the first places."""
        return [place % self.train_count]

    @abstractmethod
    def rows(self, indices: Indices) -> Batch: ...

    @abstractmethod
    def targets(self, indices: Indices) -> int:
        """How many values the loss of these rows is the mean of: at least 1 a row."""

    @abstractmethod
    def largest_token(self) -> int: ...

    @abstractmethod
    def describe(self, block_size: int) -> str:
        """What there is to train on, for the line at the start of a run."""

    def loss(self, module: nn.Module, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The mean loss of a batch, and what else is logged, as means too."""
        loss: Tensor = module(**batch, use_cache=False).loss
        return loss, {}

    def prepare(self, model: PreTrainedModel, reference: PreTrainedModel | None) -> None:  # noqa: B027
        """Called once with the model to be trained, and one to compare it with, before either is sharded."""

    def shard(self, mesh: Any) -> None:  # noqa: B027
        """Called once where the model to be trained is sharded over `mesh`."""

    def state(self) -> dict[str, Any]:
        """The place in the data after the last `indices`, where the step does not say it."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Go on from a `state`."""


class TextTask(Task):
    """The next token of packed documents."""

    def __init__(self, blocks: TokenBlocks) -> None:
        self.blocks = blocks
        self.train_count, self.eval_count = blocks.train_count, blocks.eval_count

    def rows(self, indices: Indices) -> Batch:
        tokens = self.blocks.batch(indices)
        return {"input_ids": tokens, "labels": tokens}

    def targets(self, indices: Indices) -> int:
        return len(indices) * int(self.blocks.blocks.shape[1] - 1)

    def largest_token(self) -> int:
        return self.blocks.largest_token()

    def describe(self, block_size: int) -> str:
        return f"{self.train_count} blocks of {block_size} tokens to train on, {self.eval_count} held out"


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on `device`; tensors that are one stay one."""
    moved = {id(one): one.to(device) for one in batch.values()}
    return {name: moved[id(one)] for name, one in batch.items()}
