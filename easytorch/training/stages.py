"""The optimizer's state of a pipeline's stages, as one process would have it: a full checkpoint holds that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from easytorch.training.config import TrainingConfig
from easytorch.training.optim import without_moments
from easytorch.training.optimizers import make_optimizer
from easytorch.training.parallel import ParallelModel
from easytorch.training.processes import Processes
from easytorch.training.sharded import MOMENTS, moments

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def full_state_of_stages(
    full: PreTrainedModel, parallel: ParallelModel, optimizer: torch.optim.Optimizer, processes: Processes,
    config: TrainingConfig,
) -> tuple[dict[str, Any], list[int]]:  # fmt: skip
    """(`state_dict`, the numbers of parameters without moments) of the optimizer of `full`, the model in one piece.

    Each process calls this, with the optimizer of its stage.
    """
    assert parallel.pipeline is not None
    tensors, steps = moments(parallel.model, optimizer)
    own = {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in tensors.items()}
    every, steps = parallel.pipeline.gathered(own), processes.merged(steps)
    whole, keys = make_optimizer(full, config), sorted({name.split(".", 2)[1] for name in every})
    counted = any("step" in state for state in optimizer.state.values())
    for name, parameter in full.named_parameters():
        if name in steps:
            found = {key: every[f"{MOMENTS}{key}.{name}"] for key in keys if f"{MOMENTS}{key}.{name}" in every}
            whole.state[parameter] = {**({"step": torch.tensor(steps[name])} if counted else {}), **found}
    return whole.state_dict(), without_moments(whole)
