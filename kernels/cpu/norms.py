"""Layer norm and RMS norm under autograd, whose gradients the operator `norm_backward` sums in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.cpu.inference import ABSENT, last_dim_contiguous
from easytorch.kernels.interop.definition_gradients import by_definition
from easytorch.kernels.interop.torch_func import transforming
from easytorch.kernels.layer_norm import native as layer_native
from easytorch.kernels.rms_norm import native as rms_native


def vector(tensor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A weight or bias (N,) as the operators take it."""
    return ABSENT[dtype] if tensor is None else tensor.contiguous()


class Norm(torch.autograd.Function):
    """`layer_norm` (centered) or `rms_norm`; gradients of every order, after the first the definition's."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool, level: int
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.eps, ctx.centered, ctx.level = eps, centered, level
        if centered:  # ATen's forward normalizes in float32 and rounds once
            return torch.layer_norm(x, x.shape[-1:], weight, bias, eps)
        output: Tensor = torch.ops.easytorch_cpu.rms_norm.default(
            last_dim_contiguous(x), vector(weight, x.dtype), eps, level
        )
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        if torch.is_grad_enabled() or transforming():
            definition = _definition(ctx.centered, ctx.eps)
            return *by_definition(definition, (x, weight, bias), ctx.needs_input_grad[:3], grad), None, None, None
        grads = torch.ops.easytorch_cpu.norm_backward.default(
            last_dim_contiguous(grad), last_dim_contiguous(x), vector(weight, x.dtype), vector(bias, x.dtype), ctx.eps,
            ctx.centered, ctx.level,
        )  # fmt: skip
        wanted = [found if needed else None for found, needed in zip(grads, ctx.needs_input_grad, strict=False)]
        return *wanted, None, None, None


def _definition(centered: bool, eps: float) -> Callable[..., Tensor]:
    if centered:
        return lambda x, weight, bias: layer_native.layer_norm(x, weight, bias, eps)
    return lambda x, weight, bias: rms_native.rms_norm(x, weight, eps)
