"""Training on the rows of a dataset: the next token of text and of answers, and preferences (DPO)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from easytorch.protocol.attention_inputs import packed_inputs
from easytorch.training.adapter import without_adapter
from easytorch.training.chat import IGNORED
from easytorch.training.config import TrainingConfig
from easytorch.training.preferences import dpo_loss, log_probabilities
from easytorch.training.sources import Source
from easytorch.training.task import Batch, Indices, Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class DatasetTask(Task):
    """The next token, where it has a label. Sequences that are packed into one row do not attend to each other."""

    def __init__(self, source: Source, config: TrainingConfig) -> None:
        self.source, self.config = source, config
        self.train_count, self.eval_count = source.train_count, source.eval_count
        self.model: Any = None

    def indices(self, step: int, batch_size: int, seed: int) -> np.ndarray:
        return self.source.indices(step, batch_size, seed)

    def sample(self, place: int) -> Indices:
        return self.source.sample(place)

    def rows(self, indices: Indices) -> Batch:
        batch = self.source.rows(indices)
        if "segment_ids" in batch and not self.config.packing:
            # what stands behind a sequence changes nothing before it
            used = int((batch.pop("segment_ids") >= 0).sum(1).max())
            batch = {name: one[:, :used] for name, one in batch.items()}
        return batch

    def targets(self, indices: Indices) -> int:
        return int((self.source.rows(indices)["labels"][:, 1:] != IGNORED).sum())

    def largest_token(self) -> int:
        return self.source.largest_token()

    def describe(self, block_size: int) -> str:
        return self.source.describe(block_size)

    def prepare(self, model: PreTrainedModel, reference: PreTrainedModel | None) -> None:
        self.model = model
        if self.config.task == "sft" and self.config.packing:
            # tries once whether the model keeps them apart, which cannot be tried when it is sharded
            ids = torch.zeros((1, 2), dtype=torch.int64, device=model.device)
            packed_inputs(model, {"input_ids": ids}, None, torch.tensor([[0, 1]], device=model.device))

    def loss(self, module: nn.Module, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        inputs: dict[str, Any] = dict(batch)
        segments = inputs.pop("segment_ids", None)
        if segments is not None:
            inputs, _ = packed_inputs(self.model, inputs, None, segments)
        return super().loss(module, {name: one for name, one in inputs.items() if name != "use_cache"})

    def state(self) -> dict[str, Any]:
        return self.source.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.source.restore(state)


class PreferenceTask(DatasetTask):
    """Direct preference optimization: rows are pairs of a chosen and a rejected answer.

    The reference is a frozen copy of the model before the first step, or, with LoRA, the model without its adapter.
    """

    reference: Any = None

    def rows(self, indices: Indices) -> Batch:
        batch = self.source.rows(indices)
        used = [int((batch[f"{one}_labels"] != IGNORED).nonzero()[:, 1].max()) + 1 for one in ("chosen", "rejected")]
        return {name: one[:, : max(used)] for name, one in batch.items()}

    def targets(self, indices: Indices) -> int:
        return len(indices)

    def prepare(self, model: PreTrainedModel, reference: PreTrainedModel | None) -> None:
        super().prepare(model, reference)
        if reference is not None:
            self.reference = reference.eval().requires_grad_(False)

    def shard(self, mesh: Any) -> None:
        from easytorch.distributed.sharding import shard_model
        from easytorch.training.parallel import uneven_of

        if self.reference is not None:
            shard_model(self.reference, mesh=mesh, uneven=uneven_of(self.config))

    def loss(self, module: nn.Module, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        ids, labels = (torch.cat([batch[f"chosen_{one}"], batch[f"rejected_{one}"]]) for one in ("input_ids", "labels"))
        reference = self._of_reference(ids, labels)
        return dpo_loss(
            log_probabilities(module, ids, labels), reference, self.config.beta, self.config.label_smoothing
        )

    @torch.no_grad()
    def _of_reference(self, ids: Tensor, labels: Tensor) -> Tensor:
        if self.reference is not None:
            return log_probabilities(self.reference, ids, labels)
        training = self.model.training
        self.model.eval()
        try:
            with without_adapter(self.model):
                return log_probabilities(self.model, ids, labels)
        finally:
            self.model.train(training)
