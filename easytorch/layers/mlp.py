"""The two feed-forward networks of decoders: gated, and with one projection up."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from easytorch.layers.basics import activation
from easytorch.layers.fused_linear import FusedProjections
from easytorch.layers.gate import gated
from easytorch.layers.linear import linear


class GatedMLP(FusedProjections):
    """down(act(gate(x)) * up(x)), arXiv:2002.05202: (..., D) -> (..., D)."""

    fused = ("gate_proj", "up_proj")

    def __init__(self, hidden_size: int, intermediate_size: int, act: str | nn.Module, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.act_fn = activation(act)
        self.lay_projections()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.projections(x)
        return linear(self.down_proj, gated(self.act_fn, gate, up))


class PlainMLP(nn.Module):
    """down(act(up(x))): (..., D) -> (..., D). A family names the two as its checkpoints do."""

    up_name: ClassVar[str] = "up_proj"
    down_name: ClassVar[str] = "down_proj"

    def __init__(self, hidden_size: int, intermediate_size: int, act: str | nn.Module, *, bias: bool = False) -> None:
        super().__init__()
        setattr(self, self.up_name, nn.Linear(hidden_size, intermediate_size, bias=bias))
        setattr(self, self.down_name, nn.Linear(intermediate_size, hidden_size, bias=bias))
        self.act_fn = activation(act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(getattr(self, self.down_name), self.act_fn(linear(getattr(self, self.up_name), x)))
