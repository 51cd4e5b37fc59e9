"""Gated linear units, https://arxiv.org/abs/2002.05202: an activation of the gate times the other projection."""

from __future__ import annotations

import math

import torch

from easytorch.kernels.interop.arguments import check_tensors as check_devices
from easytorch.kernels.interop.arguments import floating, together

APPROXIMATIONS = ("none", "tanh")


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """(..., N), (..., N) -> (..., N): gate * sigmoid(gate) * up.

    The activation is computed in float32 (float64 for float64), rounded to the inputs' dtype and then multiplied, as in
    transformers' MLP modules.
    """
    check_tensors("swiglu", gate, up)
    wide = _widen(gate)
    return (wide * torch.sigmoid(wide)).to(gate.dtype) * up


def geglu(gate: torch.Tensor, up: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """(..., N), (..., N) -> (..., N): gelu(gate) * up, rounded as in `swiglu`.

    approximate: "none", gate * Phi(gate) by the error function; "tanh", the formula of https://arxiv.org/abs/1606.08415.
    """
    check_tensors("geglu", gate, up, approximate)
    wide = _widen(gate)
    if approximate == "tanh":
        share = 0.5 * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (wide + 0.044715 * wide**3)))
    else:
        share = 0.5 * (1.0 + torch.erf(wide * math.sqrt(0.5)))
    return (wide * share).to(gate.dtype) * up


def check_tensors(name: str, gate: torch.Tensor, up: torch.Tensor, approximate: str = "none") -> None:
    """An error for tensors that are not floating (..., N) of one shape and dtype, and an unknown approximation."""
    if not together(gate, up):
        check_devices(name, gate=gate, up=up)
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.dim() == 0 or not floating(gate):
        raise ValueError(
            f"{name} takes two floating tensors (..., N) of one shape and dtype, got {tuple(gate.shape)} of "
            f"{gate.dtype} and {tuple(up.shape)} of {up.dtype}"
        )
    if approximate not in APPROXIMATIONS:
        raise ValueError(f"{name}: approximate must be one of {', '.join(APPROXIMATIONS)}, got {approximate!r}")


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)
