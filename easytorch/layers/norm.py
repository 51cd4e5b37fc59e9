"""RMS norms through the `rms_norm` operation."""

from __future__ import annotations

import torch
from torch import nn

from easytorch.operations import OperationRegistry

_OPERATION = OperationRegistry.create("rms_norm")


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension: (..., D) -> (..., D), in the input's dtype (arXiv:1910.07467)."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return _OPERATION(hidden_states, self.weight, self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


class ZeroCenteredRMSNorm(nn.Module):
    """x / rms(x) * (1 + weight), Gemma's: computed in float32 and then rounded to the input's dtype."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size))
        self.eps = eps
        self.operation = OperationRegistry.create("rms_norm")

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        scale = 1.0 + self.weight.float()
        return self.operation(hidden_states.float(), scale, self.eps).type_as(hidden_states)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"
