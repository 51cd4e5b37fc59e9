"""Layer normalization, https://arxiv.org/abs/1607.06450."""

from __future__ import annotations

import torch

from easytorch.kernels.interop.arguments import check_eps, floating, together
from easytorch.kernels.interop.arguments import check_tensors as check_devices


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """(..., N), weight and bias (N,) -> (..., N): (x - mean) / sqrt(variance + eps) * weight + bias over the last
    dimension, with the biased variance.

    Computed in float32 (float64 for float64) and rounded once, to x's dtype, whatever the dtype of weight and bias.
    """
    check_tensors(x, weight, bias, eps)
    wide = x if x.dtype == torch.float64 else x.to(torch.float32)
    centered = wide - wide.mean(dim=-1, keepdim=True)
    result = centered * torch.rsqrt(centered.square().mean(dim=-1, keepdim=True) + eps)
    if weight is not None:
        result = result * weight.to(wide.dtype)
    if bias is not None:
        result = result + bias.to(wide.dtype)
    return result.to(x.dtype)


def check_tensors(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> None:
    """An error for an x that is not floating or has no dimension, a weight or bias that is not (N,), an eps below 0."""
    if any(vector is not None and not together(x, vector) for vector in (weight, bias)):
        check_devices("layer_norm", x=x, weight=weight, bias=bias)
    check_eps("layer_norm", eps)
    if x.dim() == 0 or not floating(x):
        raise ValueError(f"layer_norm takes a floating x (..., N), got shape {tuple(x.shape)} of {x.dtype}")
    length = x.shape[-1]
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and (tensor.dim() != 1 or tensor.shape[0] != length):
            raise ValueError(f"layer_norm: {name} must be {tuple(x.shape[-1:])}, got {tuple(tensor.shape)}")
        if tensor is not None and not floating(tensor):
            raise ValueError(f"layer_norm: {name} must be floating, got {tensor.dtype}")
