"""Attention in C++ under autograd: the operators `flash_training` and `flash_backward`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.attention import blocked, cpp_call
from easytorch.kernels.attention.call import TENSORS, AttentionCall, flatten, gradients_by_field, unflatten
from easytorch.kernels.cpu.inference import last_dim_contiguous
from easytorch.kernels.interop.torch_func import transforming


def attention(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, level: int) -> Tensor:
    """(B, T, H, D), (B, S, K, D), (B, S, K, Dv) -> (B, T, H, Dv), with gradients for all but the bias."""
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
        call = unflatten((*tensors, *ctx.numbers))
        if torch.is_grad_enabled() or transforming():
            return *_by_definition(ctx.needs_input_grad, grad, query, key, value, call), None
        *grads, sinks_grad = torch.ops.easytorch_cpu.flash_backward.default(
            last_dim_contiguous(grad), last_dim_contiguous(query), last_dim_contiguous(key), last_dim_contiguous(value),
            output, logsumexp, *cpp_call.arguments(call), ctx.level,
        )  # fmt: skip
        wanted = [found if needed else None for found, needed in zip(grads, ctx.needs_input_grad, strict=False)]
        named = {} if call.sinks is None else {"sinks": sinks_grad.to(call.sinks.dtype)}
        return *wanted, *gradients_by_field(named), None


def _by_definition(
    needed: tuple[bool, ...], grad: Tensor, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
) -> list[Tensor | None]:
    """The gradients, which can be differentiated themselves."""
    inputs = (query, key, value, *call.tensors)
    with torch.enable_grad():
        output = blocked.blockwise(query, key, value, call)
        pairs = list(zip(inputs, needed, strict=False))
        found = iter(torch.autograd.grad(output, [x for x, need in pairs if need], grad, create_graph=True))
    return [*(next(found) if need else None for _, need in pairs), *[None] * (len(call) - TENSORS)]
