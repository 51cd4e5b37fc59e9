"""Attention in C++ under autograd: the operators `flash_training` and `flash_backward`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.attention import blocked, cpp_call
from easytorch.kernels.attention.call import AttentionCall, flatten, gradients_by_field, unflatten
from easytorch.kernels.cpu.inference import last_dim_contiguous
from easytorch.kernels.interop.definition_gradients import by_definition
from easytorch.kernels.interop.torch_func import transforming

BIAS = AttentionCall._fields.index("bias")


def attention(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, level: int) -> Tensor:
    """(B, T, H, D), (B, S, K, D), (B, S, K, Dv) -> (B, T, H, Dv), with gradients of every order."""
    output: Tensor = _Flash.apply(query, key, value, *flatten(call), level)
    return output


class _Flash(torch.autograd.Function):
    """Gradients of every order, after the first the definition's, which computes blocks of scores by ATen."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        *fields, ctx.level = rest
        call = unflatten(fields)
        output, logsumexp = torch.ops.easytorch_cpu.flash_training.default(
            last_dim_contiguous(query), last_dim_contiguous(key), last_dim_contiguous(value),
            *cpp_call.arguments(call), ctx.level,
        )  # fmt: skip
        ctx.numbers = call.numbers
        ctx.save_for_backward(query, key, value, output, logsumexp, *call.tensors)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, logsumexp, *tensors = ctx.saved_tensors
        if torch.is_grad_enabled() or transforming():
            inputs = (query, key, value, *tensors)
            found = by_definition(_definition(ctx.numbers), inputs, ctx.needs_input_grad[: len(inputs)], grad)
            return *found, *[None] * (len(ctx.numbers) + 1)
        call = unflatten((*tensors, *ctx.numbers))
        bias = call.bias if ctx.needs_input_grad[3 + BIAS] else None
        *grads, of_bias, of_sinks = torch.ops.easytorch_cpu.flash_backward.default(
            last_dim_contiguous(grad), last_dim_contiguous(query), last_dim_contiguous(key), last_dim_contiguous(value),
            output, logsumexp, *cpp_call.arguments(call), bias is not None, ctx.level,
        )  # fmt: skip
        wanted = [found if needed else None for found, needed in zip(grads, ctx.needs_input_grad, strict=False)]
        named = {} if call.sinks is None else {"sinks": of_sinks.to(call.sinks.dtype)}
        if bias is not None:
            named["bias"] = of_bias.to(bias.dtype)
        return *wanted, *gradients_by_field(named), None


def _definition(numbers: tuple[Any, ...]) -> Callable[..., Tensor]:
    """Attention of query, key, value and the call's tensors, which computes blocks of scores by ATen."""
    return lambda query, key, value, *tensors: blocked.blockwise(query, key, value, unflatten((*tensors, *numbers)))
