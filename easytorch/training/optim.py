"""AdamW with decay groups, and the learning rate as a function of the step."""

from __future__ import annotations

import math
from typing import Any

import torch

from easytorch.training.config import TrainingConfig


def make_optimizer(model: torch.nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves vectors (norms, biases) alone; the fused kernel, on CPU too."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=True,
    )


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """The moments of `state`; decay and betas stay those of `optimizer`, which a resumed run may have changed."""
    ours = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, settings in zip(optimizer.param_groups, ours, strict=True):
        group.update(settings)


def learning_rate(step: int, config: TrainingConfig) -> float:
    """The rate of step `step` (from 0): linear warm-up, then `config.schedule` down to `min_learning_rate`."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    left = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_learning_rate + (config.learning_rate - config.min_learning_rate) * left
