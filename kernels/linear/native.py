"""The definition of `linear` in plain torch, with the contract of `torch.nn.functional.linear`."""

from __future__ import annotations

from torch import Tensor, float32, float64, is_autocast_enabled

from easytorch.kernels.interop.arguments import check_tensors as check_devices
from easytorch.kernels.interop.arguments import floating, together


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(..., K), weight (N, K), bias (N,) -> (..., N): x @ weight.T + bias, in float32 (float64 for float64)."""
    check_tensors(x, weight, bias)
    working = float64 if x.dtype == float64 else float32
    result = x.to(working) @ weight.to(working).t()
    if bias is not None:
        result = result + bias.to(working)
    return result.to(x.dtype)


def check_tensors(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """An error where shapes, dtypes or devices do not fit."""
    if not together(x, weight) or (bias is not None and not together(x, bias)):
        check_devices("linear", x=x, weight=weight, bias=bias)
    if x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear takes x (..., K) and weight (N, K), got x {tuple(x.shape)} and weight {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"linear: bias must be {tuple(weight.shape[:1])}, got {tuple(bias.shape)}")
    alike = x.dtype == weight.dtype and (bias is None or bias.dtype == x.dtype)
    # autocast will cast every floating tensor
    cast = not alike and x.device.type != "meta" and is_autocast_enabled(x.device.type)
    if not floating(x) or not (alike or cast):
        given = [tensor.dtype for tensor in (x, weight, bias) if tensor is not None]
        raise ValueError(f"linear: x, weight and bias must have one floating dtype, got {', '.join(map(str, given))}")
