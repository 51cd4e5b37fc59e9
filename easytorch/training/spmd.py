"""The model over the devices of torch_xla: one process, whose programs XLA divides over a mesh."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from easytorch.distributed.sharding import full_tensors, shard_model
from easytorch.distributed.xla_spmd import divides, make_spmd_mesh, shard_batch, shard_optimizer
from easytorch.tpu_platform import sync
from easytorch.training.config import TrainingConfig, flag
from easytorch.training.parallel import ParallelModel, uneven_of, unsharded
from easytorch.training.task import Batch, Task, on_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from easytorch.distributed.pipeline_parallel import Loss


class SpmdModel(ParallelModel):
    """Two programs a step, compiled once for each shape: the gradients with their norm, and the optimizer's update.
    Pieces of a batch before the last are programs of their own. mesh: torch_xla's."""

    mesh: Any

    def step(self, batches: Iterable[Batch], divisors: Sequence[float], loss_of: Loss) -> torch.Tensor:
        total = torch.zeros((), device=self.model.device)
        for number, (batch, divisor) in enumerate(zip(batches, divisors, strict=True), start=1):
            loss = loss_of(self.module, batch) / divisor
            loss.backward()
            total = total + loss.detach()
            if number < len(divisors):
                sync(self.model.device)
        return total  # the last piece runs with the norm

    def norm(self, gradients: Iterable[torch.Tensor]) -> torch.Tensor:
        norm = super().norm(gradients)
        sync(self.model.device)
        return norm

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        sync(self.model.device)

    def evaluate(self, batch: Batch, loss_of: Loss) -> torch.Tensor:
        loss = loss_of(self.model, batch)
        sync(self.model.device)
        return loss

    def place_batch(self, batch: Batch) -> Batch:
        """Rows that do not divide over the devices, as the last held-out ones, are every device's."""
        if all(divides(one, self.mesh) for one in batch.values()):
            return shard_batch(batch, self.mesh)
        return on_device(batch, self.model.device)

    def place_moments(self, optimizer: torch.optim.Optimizer) -> None:
        shard_optimizer(self.model, optimizer)

    def seed(self, seed: int) -> None:
        import torch_xla

        super().seed(seed)
        torch_xla.manual_seed(seed)

    def to_save(self) -> PreTrainedModel:
        return unsharded(self.model, type(self.model), full_tensors(self.model))


def over_devices(model: PreTrainedModel, task: Task, config: TrainingConfig) -> SpmdModel:
    """The model over the mesh of the config, its weights moved from the CPU; `ValueError` where it does not divide."""
    try:
        mesh = make_spmd_mesh(config.axes(1))
        shard_model(model, mesh=mesh, uneven=uneven_of(config))
        task.shard(mesh)
    except (ValueError, NotImplementedError) as error:
        raise ValueError(f"{flag('mesh')} {config.mesh or 'dp=-1'}: {error}") from error
    found = SpmdModel(model, model)
    found.mesh = mesh
    return found
