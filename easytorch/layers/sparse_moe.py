"""The feed-forward network of a mixture of experts: a router and the experts it chooses."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from easytorch.layers.routers import Routed


class SparseMoe(nn.Module):
    """(B, T, D) -> (B, T, D): the experts of each token, weighted by its router (arXiv:1701.06538).

    A family names the classes, and the attributes and their order as its checkpoints have them.
    """

    router_class: ClassVar[type[Any]]  # of a config
    experts_class: ClassVar[type[Any]]
    order: ClassVar[tuple[str, str]] = ("gate", "experts")  # transformers' order, which optimizer states depend on

    gate: nn.Module
    experts: nn.Module

    def __init__(self, config: Any) -> None:
        super().__init__()
        for name in self.order:
            setattr(self, name, self.experts_class(config) if name == "experts" else self.router_class(config))
        self.router_name = next(name for name in self.order if name != "experts")

    def route(self, hidden_states: torch.Tensor) -> Routed:
        """Calls the router: (N, D) -> its logits, weights and indices."""
        return getattr(self, self.router_name)(hidden_states)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, indices = self.route(rows)
        return self.experts(rows, indices, weights).view_as(hidden_states)


def jitter(hidden_states: torch.Tensor, noise: float) -> torch.Tensor:
    """hidden_states times factors of 1 - noise to 1 + noise: used to train some routers (arXiv:2101.03961)."""
    return hidden_states * torch.empty_like(hidden_states).uniform_(1.0 - noise, 1.0 + noise)
