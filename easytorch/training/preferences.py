"""The loss of direct preference optimization (DPO, arXiv:2305.18290), smoothed as in cDPO."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from easytorch.training.chat import IGNORED


def log_probabilities(module: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """ids, labels (N, T) -> (N,), float32: the logarithm of the probability of the tokens that have a label."""
    output: Any = module(input_ids=ids, use_cache=False)
    logits = output.logits[:, :-1].float()
    losses = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="none", ignore_index=IGNORED)
    return -losses.view(len(ids), -1).sum(1)


def dpo_loss(model: Tensor, reference: Tensor, beta: float, label_smoothing: float) -> tuple[Tensor, dict[str, Tensor]]:
    """model, reference (2 N,): log probabilities of N chosen answers, then of the rejected ones.

    Returns the mean loss and TRL's metrics: a reward is beta times the logarithm of the ratio of the two models.
    """
    rewards = beta * (model - reference)
    chosen, rejected = rewards.chunk(2)
    margins = chosen - rejected
    losses = -F.logsigmoid(margins) * (1 - label_smoothing) - F.logsigmoid(-margins) * label_smoothing
    chances = model.detach().chunk(2)
    logged = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": (margins > 0).float(),
        "rewards/margins": margins,
        "logps/chosen": chances[0],
        "logps/rejected": chances[1],
    }
    return losses.mean(), {name: value.detach().mean() for name, value in logged.items()}
