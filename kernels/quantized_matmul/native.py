"""The definition of quantized_matmul: a linear layer of the dequantized weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from easytorch.kernels.interop.arguments import check_tensors, floating
from easytorch.kernels.quantized_matmul.weight import QuantizedWeight


def quantized_matmul(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (..., K), weight (N, K), bias (N,) -> (..., N) in x's dtype: x @ dequantized weight^T + bias.

    Computed in float32 (float64 for float64) and rounded once. The weight is frozen: gradients go to x and bias.
    """
    check_arguments(x, weight, bias)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    added = None if bias is None else bias.to(wide)
    return F.linear(x.to(wide), weight.dequantize(wide).detach(), added).to(x.dtype)


def check_arguments(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
    """`TypeError` unless the weight is a `QuantizedWeight`, `ValueError` unless all shapes, dtypes and devices fit."""
    if not isinstance(weight, QuantizedWeight):
        raise TypeError(
            f"quantized_matmul: weight must be a QuantizedWeight, made by quantize(), got {type(weight).__name__}"
        )
    check_tensors("quantized_matmul", x=x, weight=weight.data, bias=bias)
    rows, columns = weight.shape
    if x.dim() == 0 or x.shape[-1] != columns or (bias is not None and tuple(bias.shape) != (rows,)):
        given = "no bias" if bias is None else f"bias {tuple(bias.shape)}"
        raise ValueError(
            f"quantized_matmul takes x (..., K), weight (N, K) and bias (N,), got x {tuple(x.shape)}, weight "
            f"{tuple(weight.shape)} and {given}"
        )
    if not floating(x) or (bias is not None and not floating(bias)):
        given = f"{x.dtype}" if bias is None else f"{x.dtype} and {bias.dtype}"
        raise ValueError(f"quantized_matmul takes floating x and bias, got {given}")
