"""The state of an optimizer as checkpoints hold it, and the learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from easytorch.training.config import TrainingConfig
from easytorch.training.finite import nonfinite_values
from easytorch.training.optimizers import state_shapes


def full_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """`state_dict` with the moments of all shards gathered, as one process would have it. Each process calls this."""
    state = optimizer.state_dict()
    moments = {
        number: {
            name: value.full_tensor().cpu() if isinstance(value, DTensor) else value for name, value in own.items()
        }
        for number, own in state["state"].items()
    }
    return {**state, "state": moments}


def without_moments(optimizer: torch.optim.Optimizer) -> list[int]:
    """The indices of the parameters without moments: no step has changed them, as the loss does not depend on them."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [number for number, parameter in enumerate(parameters) if parameter not in optimizer.state]


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any], absent: object = ()) -> None:
    """The moments of `state`; decay and betas stay those of `optimizer`, which a resumed run may have changed.

    absent: `without_moments` of the optimizer that was saved.
    Moments that are sharded already are taken as they are; each process calls this then.
    `ValueError` for the state of other parameters, which torch would load and then read past the end of the moments.
    """
    if not isinstance(absent, list | tuple) or not all(type(number) is int for number in absent):
        raise ValueError(f"its list of parameters without moments is {absent!r}")
    _check_moments(optimizer, state, absent)
    ours = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict({**state, "state": _sharded(optimizer, state)})
    for group, settings in zip(optimizer.param_groups, ours, strict=True):
        group.update(settings)


def _sharded(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Moments that are sharded as their parameters are; each process keeps its own part of the full ones."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sharded = {number: one for number, one in zip(numbers, parameters, strict=True) if isinstance(one, DTensor)}
    return {
        number: {name: _shard_like(value, sharded.get(number)) for name, value in own.items()}
        for number, own in state["state"].items()
    }


def _shard_like(value: Any, parameter: DTensor | None) -> Any:
    if (
        parameter is None
        or not isinstance(value, torch.Tensor)
        or isinstance(value, DTensor)
        or value.shape != parameter.shape
        or not value.ndim
    ):
        return value
    value = value.to(parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _check_moments(optimizer: torch.optim.Optimizer, state: dict[str, Any], absent: Collection[int]) -> None:
    moments, groups = state.get("state"), state.get("param_groups")
    if not isinstance(moments, dict) or not isinstance(groups, list):
        raise ValueError("it holds no optimizer state")
    if not all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups):
        raise ValueError("it holds no optimizer state")
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in optimizer.param_groups]:
        raise ValueError("its optimizer state is for another number of parameters")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in groups for number in group["params"]]
    for place, (number, parameter) in enumerate(zip(numbers, parameters, strict=True)):
        own = moments.get(number)
        if not isinstance(own, dict):
            if moments and place not in absent:  # a run that has only skipped steps has none at all
                raise ValueError(f"its optimizer state lacks parameter {number}")
            continue
        for name, shape in state_shapes(optimizer, parameter).items():
            moment = own.get(name)
            if not isinstance(moment, torch.Tensor) or tuple(moment.shape) != shape:
                raise ValueError(f"its {name} of parameter {number} does not have the shape {shape}")
            if nonfinite_values(moment):
                raise ValueError(f"its {name} of parameter {number} has values that are not finite")


def learning_rate(step: int, config: TrainingConfig) -> float:
    """The learning rate of step `step` (from 0): linear warm-up, then `config.schedule` down to `min_learning_rate`."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    if config.schedule == "wsd":
        decay = max(1, config.steps // 10) if config.decay_steps is None else config.decay_steps
        # as in the other schedules the last step has a rate above the final one
        done = (step - (config.steps - decay)) / decay
        left = 1 - math.sqrt(done) if done > 0 else 1.0
        return config.min_learning_rate + (config.learning_rate - config.min_learning_rate) * left
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    left = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_learning_rate + (config.learning_rate - config.min_learning_rate) * left
