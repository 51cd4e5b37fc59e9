"""Layer norm in Triton, forward and backward, for CUDA and ROCm; kernels/layer_norm/native.py defines it.

Nothing here imports Triton until a kernel is launched; with TRITON_INTERPRET=1 set before that they run on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch

from easytorch.kernels.interop.triton_devices import processors
from easytorch.kernels.layer_norm.native import check_tensors
from easytorch.kernels.layer_norm.triton_limits import supports


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """(..., N), weight and bias (N,) -> (..., N) in x's dtype; rows may have any stride. Not differentiable twice.

    Raises `ValueError` for what `supports` refuses, and for shapes that do not fit.
    """
    check_tensors(x, weight, bias, eps)
    reason = supports(x, weight, bias)
    if reason is not None:
        raise ValueError(f"triton layer_norm: {reason}")
    return _forward(x, weight, bias, eps)[0]


@torch.library.custom_op("easytorch::triton_layer_norm", mutates_args=())
def _forward(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output, and the mean and 1 / standard deviation of each row, float32."""
    from easytorch.kernels.layer_norm.triton_calls import forward_call

    output, mean, rstd = _forward_fake(x, weight, bias, eps)
    forward_call(x, weight, bias, output, mean, rstd, eps).launch()
    return output, mean, rstd


@_forward.register_fake
def _forward_fake(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mean, rstd = (torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) for _ in range(2))
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), mean, rstd


@torch.library.custom_op("easytorch::triton_layer_norm_backward", mutates_args=())
def _backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, mean: torch.Tensor,
    rstd: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients of x, weight and bias; empty for those that are None."""
    from easytorch.kernels.layer_norm.triton_calls import backward_call, backward_programs

    x_grad, weight_grad, bias_grad = _backward_fake(grad, x, weight, bias, mean, rstd)
    programs = backward_programs(x, processors(x.device))
    weight_parts, bias_parts = (
        None if vector is None else torch.empty((programs, x.shape[-1]), dtype=torch.float32, device=x.device)
        for vector in (weight, bias)
    )
    backward_call(grad, x, weight, mean, rstd, x_grad, weight_parts, bias_parts, programs).launch()
    for total, parts in ((weight_grad, weight_parts), (bias_grad, bias_parts)):
        if parts is not None:
            total.copy_(parts.sum(0))
    return x_grad, weight_grad, bias_grad


@_backward.register_fake
def _backward_fake(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, mean: torch.Tensor,
    rstd: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    def like(tensor: torch.Tensor | None) -> torch.Tensor:
        # contiguous whatever the strides of the input: those may overlap
        source = x if tensor is None else tensor
        return torch.empty((0,) if tensor is None else tensor.shape, dtype=source.dtype, device=x.device)

    return like(x), like(weight), like(bias)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weight, bias, _ = inputs
    ctx.save_for_backward(x, weight, bias, *output[1:])


def _autograd(ctx: Any, grad: torch.Tensor, mean_grad: Any, rstd_grad: Any) -> tuple[torch.Tensor | None, ...]:
    grads = _backward(grad, *ctx.saved_tensors)
    return *(g if needed else None for g, needed in zip(grads, ctx.needs_input_grad[:3], strict=True)), None


_forward.register_autograd(_autograd, setup_context=_setup_context)
