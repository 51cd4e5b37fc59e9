"""Norms of hidden states, through the `rms_norm` and `layer_norm` operations."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from easytorch.layers.stock_names import same_as
from easytorch.operations import OperationRegistry
from easytorch.operations.dispatch.environment import untouched
from easytorch.operations.rms_norm import RMSNorm as RMSNormOperation

rms_norm = cast(RMSNormOperation, OperationRegistry.create("rms_norm"))
layer_norm = OperationRegistry.create("layer_norm")


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension: (..., D) -> (..., D), in the input's dtype (arXiv:1910.07467)."""

    eps = same_as("variance_epsilon")
    with_scale = True

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if untouched() and (rows := rms_norm.try_cpp(hidden_states, weight, self.variance_epsilon)) is not None:
            return rows
        return rms_norm(hidden_states, weight, self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


class Float32RMSNorm(RMSNorm):
    """RMSNorm, rounded to the input's dtype after the product with the weight instead of before it (OLMo, Helium)."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        weight = self.weight.float()
        return rms_norm(hidden_states.float(), weight, self.variance_epsilon).type_as(hidden_states)


class PlainRMSNorm(nn.Module):
    """x / rms(x) over the last dimension, without a weight, in float32: (..., D) -> (..., D)."""

    with_scale = False

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states.float(), None, self.eps).type_as(hidden_states)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"


class ZeroCenteredRMSNorm(nn.Module):
    """x / rms(x) * (1 + weight), Gemma's: computed in float32 and then rounded to the input's dtype."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size))
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        scale = 1.0 + self.weight.float()
        return rms_norm(hidden_states.float(), scale, self.eps).type_as(hidden_states)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class LayerNorm(nn.LayerNorm):
    """(x - mean(x)) / std(x) * weight + bias over the last dimension (arXiv:1607.06450), as `nn.LayerNorm`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return layer_norm(input, self.weight, self.bias, self.eps)
