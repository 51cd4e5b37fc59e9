"""The two feed-forward networks of decoders: gated, and with one projection up."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from easytorch.layers.basics import activation, plain_activation
from easytorch.layers.fused_linear import FusedProjections
from easytorch.layers.gate import gated
from easytorch.layers.linear import eager_inference, linear, plain_weight, watched

# The bytes from which glibc's malloc always maps memory anew, and the fewest tokens for which products are as fast.
FRESH, LEAST_ROWS = 2**25, 256


class GatedMLP(FusedProjections):
    """down(act(gate(x)) * up(x)), arXiv:2002.05202: (..., D) -> (..., D).

    act_name: what transformers calls the activation, for hooks; most families as here.
    """

    act_name: ClassVar[str] = "act_fn"
    fused = ("gate_proj", "up_proj")

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        act: str | nn.Module,
        *,
        bias: bool = False,
        layer: Callable[[int, int], nn.Module] | None = None,
    ) -> None:
        """layer: makes a projection of its sizes, in and out; an `nn.Linear` with `bias` unless given."""
        super().__init__()
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        make = layer or partial(nn.Linear, bias=bias)
        self.gate_proj: Any = make(hidden_size, intermediate_size)
        self.up_proj: Any = make(hidden_size, intermediate_size)
        self.down_proj: Any = make(intermediate_size, hidden_size)
        setattr(self, self.act_name, activation(act))
        self.lay_projections()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self._rows_at_once(x)
        if rows is None:
            return self._network(x)
        parts = [self._network(part) for part in x.reshape(-1, x.shape[-1]).split(rows)]
        return torch.cat(parts).view(*x.shape[:-1], -1)

    def _network(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.projections(x)
        return linear(self.down_proj, gated(getattr(self, self.act_name), gate, up))

    def _rows_at_once(self, x: torch.Tensor) -> int | None:
        """How many tokens go through the network at once; None for all, and where a hook would be called for each part.

        On a CPU in inference, memory of `FRESH` bytes and more is new from the system for every call: to fill it takes
        as long as a sixth of the products. 1024 tokens, 4096 of 1024, float32: 0.93 of the time in halves.
        """
        shape = x.shape
        bytes_of_row = 2 * self.gate_proj.out_features * x.element_size() if self.joins else 0
        if x.numel() // max(shape[-1], 1) * bytes_of_row < FRESH or not x.is_cpu or not eager_inference():
            return None
        layers = (self.gate_proj, self.up_proj, self.down_proj)
        if any(plain_weight(layer) is None for layer in layers) or watched(getattr(self, self.act_name)):
            return None
        return max(LEAST_ROWS, FRESH // 2 // bytes_of_row)


class PlainMLP(nn.Module):
    """down(act(up(x))): (..., D) -> (..., D). A family names the two as its checkpoints do, and act as transformers."""

    up_name: ClassVar[str] = "up_proj"
    down_name: ClassVar[str] = "down_proj"
    act_name: ClassVar[str] = "act_fn"

    def __init__(self, hidden_size: int, intermediate_size: int, act: str | nn.Module, *, bias: bool = False) -> None:
        super().__init__()
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        setattr(self, self.up_name, nn.Linear(hidden_size, intermediate_size, bias=bias))
        setattr(self, self.down_name, nn.Linear(intermediate_size, hidden_size, bias=bias))
        setattr(self, self.act_name, plain_activation(act))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        act, up, down = (getattr(self, name) for name in (self.act_name, self.up_name, self.down_name))
        return linear(down, act(linear(up, x)))
