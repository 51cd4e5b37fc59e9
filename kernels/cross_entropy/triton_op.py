"""Softmax cross entropy in Triton, forward and backward, for CUDA and ROCm; kernels/cross_entropy/native.py defines it.

Nothing here imports Triton until a kernel is launched; with TRITON_INTERPRET=1 set before that they run on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch

from easytorch.kernels.cross_entropy.native import check_arguments, check_logits, reduce
from easytorch.kernels.interop.triton_devices import refusal


def supports(logits: torch.Tensor, dtype: torch.dtype | None = None) -> str | None:
    """None when these kernels carry logits (or hidden states) as `dtype` (None: their own), else the reason why not."""
    return refusal(logits.device, dtype or logits.dtype)


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """logits (..., V), labels (...) -> the loss, float32. Keeps the logits and two numbers per row for the backward.

    A label outside [0, V) that is not `ignore_index` gives NaN. Not differentiable twice. Raises `ValueError` for what
    `supports` refuses, and for arguments that do not fit.
    """
    check_arguments(logits.shape, labels, label_smoothing, softcap, z_loss, reduction, ignore_index)
    check_logits(logits, labels)
    reason = supports(logits)
    if reason is not None:
        raise ValueError(f"triton cross_entropy: {reason}")
    losses, _ = _forward(logits, labels, ignore_index, label_smoothing, softcap, z_loss)
    return reduce(losses, labels, ignore_index, reduction)


@torch.library.custom_op("easytorch::triton_cross_entropy", mutates_args=())
def _forward(
    logits: torch.Tensor, labels: torch.Tensor, ignore_index: int, label_smoothing: float, softcap: float | None,
    z_loss: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The loss of each row, and its logsumexp in two parts (2, ...), float32."""
    from easytorch.kernels.cross_entropy.triton_calls import forward_call

    losses, lse = _forward_fake(logits, labels)
    forward_call(logits, labels, losses, lse, ignore_index, label_smoothing, softcap, z_loss).launch()
    return losses, lse


@_forward.register_fake
def _forward_fake(logits: torch.Tensor, labels: torch.Tensor, *settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    losses, lse = (
        torch.empty(*shape, *labels.shape, dtype=torch.float32, device=logits.device) for shape in ((), (2,))
    )
    return losses, lse


@torch.library.custom_op("easytorch::triton_cross_entropy_backward", mutates_args=())
def _backward(
    losses_grad: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, lse: torch.Tensor, ignore_index: int,
    label_smoothing: float, softcap: float | None, z_loss: float,
) -> torch.Tensor:  # fmt: skip
    from easytorch.kernels.cross_entropy.triton_calls import backward_call

    grad = _backward_fake(losses_grad, logits)
    backward_call(losses_grad, logits, labels, lse, grad, ignore_index, label_smoothing, softcap, z_loss).launch()
    return grad


@_backward.register_fake
def _backward_fake(losses_grad: torch.Tensor, logits: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, labels, *ctx.settings = inputs
    ctx.save_for_backward(logits, labels, output[1])


def _autograd(ctx: Any, losses_grad: torch.Tensor, lse_grad: Any) -> tuple[torch.Tensor | None, ...]:
    return _backward(losses_grad, *ctx.saved_tensors, *ctx.settings), None, None, None, None, None


_forward.register_autograd(_autograd, setup_context=_setup_context)
