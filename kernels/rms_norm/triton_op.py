"""RMS norm in Triton, forward and backward, for CUDA and ROCm; kernels/rms_norm/native.py defines it.

Its kernels are those of layer norm without a mean. Nothing here imports Triton until a kernel is launched; with
TRITON_INTERPRET=1 set before that they run on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch

from easytorch.kernels.interop.triton_devices import processors
from easytorch.kernels.layer_norm.triton_limits import supports
from easytorch.kernels.rms_norm.native import check_tensors


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6) -> torch.Tensor:
    """(..., N), weight (N,) -> (..., N); rows may have any stride. A wider weight widens the result.

    Not differentiable twice. Raises `ValueError` for what `supports` refuses, and for shapes that do not fit.
    """
    check_tensors(x, weight, eps)
    reason = supports(x, weight)
    if reason is not None:
        raise ValueError(f"triton rms_norm: {reason}")
    return _forward(x, weight, eps)[0]


@torch.library.custom_op("easytorch::triton_rms_norm", mutates_args=())
def _forward(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and 1 / root mean square of each row, float32."""
    from easytorch.kernels.layer_norm.triton_calls import forward_call

    output, rstd = _forward_fake(x, weight, eps)
    forward_call(x, weight, None, output, None, rstd, eps).launch()
    return output, rstd


@_forward.register_fake
def _forward_fake(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    output = torch.empty(x.shape, dtype=dtype, device=x.device)
    return output, torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)


@torch.library.custom_op("easytorch::triton_rms_norm_backward", mutates_args=())
def _backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of x and weight; the second is empty without a weight."""
    from easytorch.kernels.layer_norm.triton_calls import backward_call, backward_programs

    x_grad, weight_grad = _backward_fake(grad, x, weight, rstd)
    programs, parts = backward_programs(x, processors(x.device)), None
    if weight is not None:
        parts = torch.empty((programs, x.shape[-1]), dtype=torch.float32, device=x.device)
    backward_call(grad, x, weight, None, rstd, x_grad, parts, None, programs).launch()
    if parts is not None:
        weight_grad.copy_(parts.sum(0))
    return x_grad, weight_grad


@_backward.register_fake
def _backward_fake(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    shape, dtype = ((0,), x.dtype) if weight is None else (weight.shape, weight.dtype)
    x_grad = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return x_grad, torch.empty(shape, dtype=dtype, device=x.device)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs[:2], output[1])


def _autograd(ctx: Any, grad: torch.Tensor, rstd_grad: Any) -> tuple[torch.Tensor | None, ...]:
    x_grad, weight_grad = _backward(grad, *ctx.saved_tensors)
    return x_grad if ctx.needs_input_grad[0] else None, weight_grad if ctx.needs_input_grad[1] else None, None


_forward.register_autograd(_autograd, setup_context=_setup_context)
