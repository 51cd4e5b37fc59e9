"""The optimizer's state of a pipeline's stages as one process has it, which a full checkpoint holds, and back."""

from __future__ import annotations

from collections.abc import Mapping
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
    every, steps = parallel.pipeline.gathered(tensors), processes.merged(steps)
    whole, keys = make_optimizer(full, config), sorted({name.split(".", 2)[1] for name in every})
    counted = any("step" in state for state in optimizer.state.values())
    for name, parameter in full.named_parameters():
        if name in steps:
            found = {key: every[f"{MOMENTS}{key}.{name}"] for key in keys if f"{MOMENTS}{key}.{name}" in every}
            whole.state[parameter] = {**({"step": torch.tensor(steps[name])} if counted else {}), **found}
    return whole.state_dict(), without_moments(whole)


def state_of_stage(
    state: Mapping[str, Any], absent: Any, parallel: ParallelModel, optimizer: torch.optim.Optimizer,
    config: TrainingConfig,
) -> tuple[dict[str, Any], Any]:  # fmt: skip
    """(`state_dict`, numbers of parameters without moments) of this stage, of those of the model in one piece.

    `ValueError` where they are of another model.
    """
    full = parallel.outline()
    names = {parameter: name for name, parameter in full.named_parameters()}
    groups = make_optimizer(full, config).param_groups
    saved = state.get("param_groups")
    if not isinstance(state.get("state"), dict) or not isinstance(saved, list):
        raise ValueError("it holds no optimizer state")
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in saved]:
        raise ValueError("its optimizer state is for another number of parameters")
    numbers = {
        names[parameter]: number
        for group, stored in zip(groups, saved, strict=True)
        for parameter, number in zip(group["params"], stored["params"], strict=True)
    }
    of_stage = {parameter: name for name, parameter in parallel.model.named_parameters()}
    own = optimizer.state_dict()
    ordered = [of_stage[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    moments = {
        place: state["state"][numbers[name]] for place, name in enumerate(ordered) if numbers[name] in state["state"]
    }
    if isinstance(absent, list | tuple):  # anything else is damage, which `load_optimizer` reports
        absent = [place for place, name in enumerate(ordered) if numbers[name] in absent]
    return {**own, "state": moments}, absent
