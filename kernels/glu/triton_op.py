"""Gated linear units in Triton, forward and backward, for CUDA and ROCm; kernels/glu/native.py defines them.

Nothing here imports Triton until a kernel is launched; with TRITON_INTERPRET=1 set before that they run on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch

from easytorch.kernels.glu.native import check_tensors
from easytorch.kernels.interop.triton_devices import refusal


def supports(gate: torch.Tensor, dtype: torch.dtype | None = None) -> str | None:
    """None when these kernels carry the tensors as `dtype` (None: their own), else the reason why not."""
    return refusal(gate.device, dtype or gate.dtype)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """(..., N), (..., N) -> (..., N): silu(gate) * up. Rows may have any stride: halves of one tensor are not copied.

    Only gate and up are kept for the backward. Not differentiable twice. Raises `ValueError` for what `supports`
    refuses, and for shapes that do not fit.
    """
    check_tensors("swiglu", gate, up)
    return _run(gate, up, "silu")


def geglu(gate: torch.Tensor, up: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """(..., N), (..., N) -> (..., N): gelu(gate) * up, in all else as `swiglu`."""
    check_tensors("geglu", gate, up, approximate)
    return _run(gate, up, "gelu" if approximate == "none" else "gelu_tanh")


def _run(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    reason = supports(gate)
    if reason is not None:
        raise ValueError(f"triton gated linear unit: {reason}")
    return _forward(gate, up, activation)


@torch.library.custom_op("easytorch::triton_glu", mutates_args=())
def _forward(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    from easytorch.kernels.glu.triton_calls import forward_call

    output = _forward_fake(gate, up, activation)
    forward_call(gate, up, output, activation).launch()
    return output


@_forward.register_fake
def _forward_fake(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


@torch.library.custom_op("easytorch::triton_glu_backward", mutates_args=())
def _backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of gate and up."""
    from easytorch.kernels.glu.triton_calls import backward_call

    gate_grad, up_grad = _backward_fake(grad, gate, up, activation)
    backward_call(grad, gate, up, gate_grad, up_grad, activation).launch()
    return gate_grad, up_grad


@_backward.register_fake
def _backward_fake(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return _forward_fake(gate, up, activation), _forward_fake(gate, up, activation)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    gate, up, ctx.activation = inputs
    ctx.save_for_backward(gate, up)


def _autograd(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    grads = _backward(grad, *ctx.saved_tensors, ctx.activation)
    return *(g if needed else None for g, needed in zip(grads, ctx.needs_input_grad[:2], strict=True)), None


_forward.register_autograd(_autograd, setup_context=_setup_context)
