"""Rotary in Triton, forward and backward, for CUDA and ROCm; kernels/rotary/native.py defines it.

Nothing here imports Triton until a kernel is launched; with TRITON_INTERPRET=1 set before that it runs on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch

from easytorch.kernels.interop.triton_devices import DTYPES, refusal
from easytorch.kernels.rotary import native


def supports(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype | None = None
) -> str | None:
    """None when the kernel takes query and key as `dtype` (None: their own), else the reason."""
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        return "gradients of the tables are taken by the definition"
    if cos.dtype not in DTYPES or sin.dtype not in DTYPES:
        return f"its tables are float32, float16 or bfloat16, got {cos.dtype}, {sin.dtype}"
    return refusal(query.device, dtype or query.dtype) or refusal(query.device, dtype or key.dtype)


def rotary(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False,
    position_ids: torch.Tensor | None = None, offset: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The definition's result, computed in float32 and rounded once; query and key may be slices of one projection.

    Not differentiable twice. Raises `ValueError` for what `supports` refuses, and for shapes that do not fit.
    """
    cos, sin = (table.squeeze(2) for table in native.tables(query, key, cos, sin, position_ids, offset))
    reason = supports(query, key, cos, sin)
    if reason is not None:
        raise ValueError(f"triton rotary: {reason}")
    return _forward(query, key, cos, sin, interleaved)


def _launch(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, back: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    from easytorch.kernels.rotary.triton_calls import turn_call

    outputs = _empty(query, key)
    turn_call(query, key, *outputs, cos, sin, interleaved=interleaved, back=back).launch()
    return outputs


@torch.library.custom_op("easytorch::triton_rotary", mutates_args=())
def _forward(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return _launch(query, key, cos, sin, interleaved, back=False)


@torch.library.custom_op("easytorch::triton_rotary_backward", mutates_args=())
def _backward(
    query_grad: torch.Tensor, key_grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients, rotated back."""
    return _launch(query_grad, key_grad, cos, sin, interleaved, back=True)


def _empty(query: torch.Tensor, key: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.empty(query.shape, dtype=query.dtype, device=query.device),
        torch.empty(key.shape, dtype=key.dtype, device=key.device),
    )


_forward.register_fake(_empty)
_backward.register_fake(_empty)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    _, _, cos, sin, ctx.interleaved = inputs
    ctx.save_for_backward(cos, sin)


def _autograd(ctx: Any, query_grad: torch.Tensor, key_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    grads = _backward(query_grad, key_grad, *ctx.saved_tensors, ctx.interleaved)
    return *(g if needed else None for g, needed in zip(grads, ctx.needs_input_grad[:2], strict=True)), None, None, None


_forward.register_autograd(_autograd, setup_context=_setup_context)
