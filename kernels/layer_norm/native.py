"""Layer normalization, https://arxiv.org/abs/1607.06450."""

from __future__ import annotations

import torch


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """(..., N), weight and bias (N,) -> (..., N): (x - mean) / sqrt(variance + eps) * weight + bias over the last
    dimension, the variance that of the population.

    Computed in float32 (float64 for float64) and rounded once, to x's dtype, whatever the dtype of weight and bias.
    """
    check_tensors(x, weight, bias)
    wide = x if x.dtype == torch.float64 else x.to(torch.float32)
    centered = wide - wide.mean(dim=-1, keepdim=True)
    result = centered * torch.rsqrt(centered.square().mean(dim=-1, keepdim=True) + eps)
    if weight is not None:
        result = result * weight.to(wide.dtype)
    if bias is not None:
        result = result + bias.to(wide.dtype)
    return result.to(x.dtype)


def check_tensors(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
    """`ValueError` for an x that is not floating or has no dimension, and for a weight or bias that is not (N,)."""
    if x.dim() == 0 or not x.is_floating_point():
        raise ValueError(f"layer_norm takes a floating tensor (..., N), got shape {tuple(x.shape)} of {x.dtype}")
    length = x.shape[-1]
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and (tensor.dim() != 1 or tensor.shape[0] != length):
            raise ValueError(f"layer_norm: {name} must be {tuple(x.shape[-1:])}, got {tuple(tensor.shape)}")
