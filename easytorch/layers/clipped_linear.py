"""A linear layer whose inputs and outputs are clipped to bounds that its checkpoint has (Gemma 4's towers)."""

from __future__ import annotations

import math

import torch
from torch import nn
from transformers import initialization

from easytorch.layers.linear import linear

_BOUNDS = {"input_min": -math.inf, "input_max": math.inf, "output_min": -math.inf, "output_max": math.inf}


class ClippedLinear(nn.Module):
    """clamp(linear(clamp(x))), without bias: (..., K) -> (..., N). clips: False for the product alone, without
    bounds in the checkpoint."""

    input_min: torch.Tensor
    input_max: torch.Tensor
    output_min: torch.Tensor
    output_max: torch.Tensor

    def __init__(self, in_features: int, out_features: int, *, clips: bool) -> None:
        super().__init__()
        self.clips = clips
        self.linear = nn.Linear(in_features, out_features, bias=False)
        for name, bound in _BOUNDS.items() if clips else ():
            self.register_buffer(name, torch.tensor(bound))

    def reset_bounds(self) -> None:
        """Bounds that clip nothing, for new weights."""
        for name, bound in _BOUNDS.items() if self.clips else ():
            initialization.constant_(getattr(self, name), bound)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.clips:
            return linear(self.linear, x)
        product = linear(self.linear, torch.clamp(x, self.input_min, self.input_max))
        return torch.clamp(product, self.output_min, self.output_max)
