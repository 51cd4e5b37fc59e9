"""Causal convolution in Triton, forward and backward, for CUDA and ROCm; native.py defines it.

Nothing here imports Triton until a kernel is launched; with TRITON_INTERPRET=1 set before that it runs on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch

from easytorch.kernels.causal_conv1d.native import check_arguments, document_of, last_tokens, with_past
from easytorch.kernels.interop.triton_devices import DTYPES, refusal
from easytorch.kernels.recurrence import documents

WIDEST = 16


def supports(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype | None = None) -> str | None:
    """None when the kernels carry x, taken as `dtype` (None: its own), else the reason why not."""
    if weight.shape[-1] > WIDEST:
        return f"its taps are unrolled, at most {WIDEST} of them, got {weight.shape[-1]}"
    if weight.dtype not in DTYPES:
        return f"its weights are float32, float16 or bfloat16, got {weight.dtype}"
    return refusal(x.device, dtype or x.dtype)


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    activation: str | None = None,
    segment_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`native.causal_conv1d` in Triton: the same shapes and dtypes; `ValueError` also for what `supports` refuses.

    Not differentiable twice.
    """
    check_arguments(x, weight, bias, initial_state, activation, segment_ids)
    reason = supports(x, weight)
    if reason is not None:
        raise ValueError(f"triton causal_conv1d: {reason}")
    number = None if segment_ids is None else documents.numbers(segment_ids).to(torch.int32)
    outputs = _forward(x, weight, bias, initial_state, number, activation is not None)
    width = weight.shape[1]
    recent = x[:, max(0, x.shape[1] - (width - 1)) :]
    past = with_past(recent, initial_state, width)[:, recent.shape[1] :]
    return outputs, last_tokens(past, None if segment_ids is None else document_of(segment_ids, width))


@torch.library.custom_op("easytorch::triton_causal_conv1d", mutates_args=())
def _forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor | None,
    number: torch.Tensor | None, silu: bool,
) -> torch.Tensor:  # fmt: skip
    from easytorch.kernels.causal_conv1d.triton_calls import forward_call

    output = _forward_fake(x, weight, bias, state, number, silu)
    weight, bias, state, number = _adjacent(weight, bias, state, number)
    forward_call(x, weight, bias, state, number, output, silu).launch()
    return output


@_forward.register_fake
def _forward_fake(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor | None,
    number: torch.Tensor | None, silu: bool,
) -> torch.Tensor:  # fmt: skip
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("easytorch::triton_causal_conv1d_backward", mutates_args=())
def _backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor | None,
    number: torch.Tensor | None, silu: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients of x, weight, bias and state."""
    from easytorch.kernels.causal_conv1d import triton_calls as calls

    x_grad, weight_grad, bias_grad, state_grad = _backward_fake(grad, x, weight, bias, state, number, silu)
    weight, bias, state, number = _adjacent(weight, bias, state, number)
    channels, width = weight.shape
    sums_grad = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    parts = torch.empty((calls.tiles(x), width, channels), dtype=torch.float32, device=x.device)
    bias_parts = torch.empty((calls.tiles(x), channels), dtype=torch.float32, device=x.device)
    calls.backward_sums_call(grad, x, weight, bias, state, number, sums_grad, parts, bias_parts, silu).launch()
    calls.backward_tokens_call(sums_grad, weight, number, x_grad, state_grad).launch()
    weight_grad.copy_(parts.sum(0).t())
    bias_grad.copy_(bias_parts.sum(0))
    return x_grad, weight_grad, bias_grad, state_grad


@_backward.register_fake
def _backward_fake(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor | None,
    number: torch.Tensor | None, silu: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    channels, width = weight.shape
    bias_dtype = weight.dtype if bias is None else bias.dtype
    state_shape = (x.shape[0], channels, width - 1)
    return (
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
        torch.empty(weight.shape, dtype=weight.dtype, device=x.device),
        torch.empty((channels,), dtype=bias_dtype, device=x.device),
        torch.empty(state_shape, dtype=torch.float32, device=x.device),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)


def _autograd(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x_grad, weight_grad, bias_grad, state_grad = _backward(grad, *ctx.saved_tensors, ctx.silu)
    state = ctx.saved_tensors[3]
    grads = (x_grad, weight_grad, bias_grad, state_grad if state is None else state_grad.to(state.dtype))
    needed = (g if need else None for g, need in zip(grads, ctx.needs_input_grad[:4], strict=True))
    return *needed, None, None


_forward.register_autograd(_autograd, setup_context=_setup_context)


def _adjacent(
    weight: torch.Tensor, *others: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    bias, state, number = (None if tensor is None else tensor.contiguous() for tensor in others)
    return weight.contiguous(), bias, state, number
