"""The model, the optimizer's moments and the progress of a run, in a checkpoint that each process writes its part of.

checkpoint-500/
  shard-*.safetensors     weights, by their names, and moments, as `optimizer.exp_avg.<weight>`
  training_state.json     the step, the settings, the steps of each weight's optimizer state
  config.json, ...        as transformers writes them
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from easytorch.bridge.convert import convert
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.storage.atomic import new_folder
from easytorch.distributed.shards import ShardsFailedError, load_shards, model_tensors, saved_tensors
from easytorch.training.checkpoint import OLDER, PROGRESS, damaged
from easytorch.training.finite import nonfinite_parameter
from easytorch.training.optim import load_optimizer
from easytorch.training.optimizers import state_shapes
from easytorch.training.processes import Processes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODEL = "model"  # the folder of a run with the final model as transformers writes it
MOMENTS = "optimizer."


def moments(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, float]]:
    """(name in a checkpoint -> moment, sharded as its weight; name of a weight -> its number of optimizer steps)."""
    tensors, steps = dict[str, Tensor](), dict[str, float]()
    for name, parameter in model.named_parameters():
        if own := optimizer.state.get(parameter):
            steps[name] = float(own.get("step", 0.0))  # Muon and Lion count none
            tensors |= {f"{MOMENTS}{key}.{name}": value for key, value in own.items() if key != "step"}
    return tensors, steps


def progress_text(step: int, settings: Mapping[str, Any], steps: Mapping[str, float], data: Mapping[str, Any]) -> str:
    """The content of `training_state.json`."""
    state = {"step": step, "settings": settings, "optimizer_steps": steps, "data": data}
    return json.dumps(state, indent=1) + "\n"


def export_model(checkpoint: Path, folder: Path) -> None:
    """Write the model of a sharded checkpoint as a model folder, which is replaced if it exists.

    Tensors are assembled from the shards and written one at a time, as by `easytorch convert`.
    """
    with new_folder(folder, replace=True) as staging:
        staging.rmdir()  # it makes its own
        convert(checkpoint, staging, to="torch")
        (staging / PROGRESS).unlink(missing_ok=True)


def restore(
    checkpoint: Path,
    state: Mapping[str, Any],
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    processes: Processes,
) -> None:
    """Fill the sharded model and the optimizer, each process its own part. state: the content of `training_state.json`.

    `CheckpointError` in one process and `OtherProcessError` in the others where the checkpoint does not fit or is
    damaged.
    """
    steps, weights = state["optimizer_steps"], model_tensors(model)
    tensors = dict(weights)
    own: dict[str, dict[str, Any]] = {}
    with processes.together():
        try:
            saved = saved_tensors(checkpoint)
        except (SafetensorError, ValueError, KeyError, OSError) as error:
            raise damaged(checkpoint, error, OLDER.format(checkpoint)) from error
        for name, parameter in model.named_parameters():
            if name in steps:
                shapes = state_shapes(optimizer, parameter)
                found = {key: _zeros(parameter, shape) for key, shape in shapes.items() if key != "step"}
                tensors |= {f"{MOMENTS}{key}.{name}": value for key, value in found.items()}
                own[name] = {**({"step": torch.tensor(float(steps[name]))} if "step" in shapes else {}), **found}
        _check_fit(checkpoint, tensors, saved)
    failed: dict[int, BaseException] = {}
    try:
        load_shards(tensors, checkpoint, group=processes.cpu_group())
    except ShardsFailedError as error:
        failed = error.causes
    with processes.together():
        if processes.rank in failed:
            raise damaged(checkpoint, failed[processes.rank], OLDER.format(checkpoint))
    bad = nonfinite_parameter(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbered = {number: own[names[one]] for number, one in enumerate(parameters) if names[one] in own}
    absent = [number for number in range(len(parameters)) if number not in numbered]
    why = ""
    try:
        load_optimizer(optimizer, {**optimizer.state_dict(), "state": numbered}, absent)
    except ValueError as error:
        why = str(error)
    with processes.together():
        if bad is not None or why:
            raise CheckpointError(f"cannot be resumed from: {bad or why}; {OLDER.format(checkpoint)}", file=checkpoint)


def _zeros(parameter: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.zeros_like(parameter.detach()) if shape == parameter.shape else parameter.detach().new_zeros(shape)


def _check_fit(checkpoint: Path, tensors: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
    missing = sorted(tensors.keys() - saved.keys())
    if missing:
        raise CheckpointError(f"lacks {missing[0]}; {OLDER.format(checkpoint)}", file=checkpoint)
    for name, one in tensors.items():
        if saved[name].size != one.shape:
            raise CheckpointError(
                f"{name} has the shape {tuple(saved[name].size)}, and the model's is {tuple(one.shape)}; "
                f"{OLDER.format(checkpoint)}",
                file=checkpoint,
            )
