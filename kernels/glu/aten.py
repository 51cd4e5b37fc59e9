"""Gated linear units by ATen's activations, which compute in float32 and round once, as the definition does."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from easytorch.kernels.glu.native import check_tensors


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """(..., N), (..., N) -> (..., N): silu(gate) * up."""
    check_tensors("swiglu", gate, up)
    return F.silu(gate) * up


def geglu(gate: torch.Tensor, up: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """(..., N), (..., N) -> (..., N): gelu(gate) * up."""
    check_tensors("geglu", gate, up, approximate)
    return F.gelu(gate, approximate=approximate) * up
