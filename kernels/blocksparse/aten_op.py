"""aten_blocks.py as torch operators: `easytorch::blocksparse_forward` and `_backward`, on the CPU.

They work under autograd, torch.compile (no graph break) and torch.export. Not differentiable twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.attention.call import flatten, schema, unflatten
from easytorch.kernels.attention.layout import four_dims
from easytorch.kernels.attention.native import working_dtype
from easytorch.kernels.attention.operators import RESULTS, Gradients, for_autograd, given, like, split
from easytorch.kernels.blocksparse import aten_blocks
from easytorch.kernels.blocksparse.contract import resolve


def attention(query: Tensor, key: Tensor, value: Tensor, **features: Any) -> Tensor:
    """(B, T, H, D), (B, S, K, D), (B, S, K, Dv) -> (B, T, H, Dv), in the query's dtype."""
    call, rule = resolve(query, key, value, **features)
    structure = rule.structure(query.shape[1], key.shape[1], query.device)
    return blocksparse_forward(query, key, value, structure.begin, structure.end, *flatten(call))[0]


@torch.library.custom_op(
    "easytorch::blocksparse_forward", mutates_args=(), device_types="cpu",
    schema=f"(Tensor query, Tensor key, Tensor value, Tensor begin, Tensor end, {schema()}) -> (Tensor, Tensor)",
)  # fmt: skip
def blocksparse_forward(
    query: Tensor, key: Tensor, value: Tensor, begin: Tensor, end: Tensor, *fields: Any
) -> tuple[Tensor, Tensor]:
    """Output (B, T, H, Dv) and logsumexp (B, H, 2, T) in the dtype of the softmax."""
    if 0 in (*query.shape[:3], value.shape[3]):  # no numbers come out
        batch, length, heads = query.shape[:3]
        empty = query.new_zeros(batch, length, heads, value.shape[3])
        return empty, query.new_zeros(batch, heads, 2, length, dtype=working_dtype(query))
    with torch.autocast("cpu", enabled=False):  # it would round scores and sums
        return aten_blocks.forward(query, key, value, begin, end, four_dims(unflatten(fields)))


@blocksparse_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, length, heads = query.shape[:3]
    output = query.new_empty(batch, length, heads, value.shape[3])
    return output, query.new_empty(batch, heads, 2, length, dtype=working_dtype(query))


@torch.library.custom_op(
    "easytorch::blocksparse_backward", mutates_args=(), device_types="cpu",
    schema="(Tensor grad, Tensor output, Tensor logsumexp, Tensor query, Tensor key, Tensor value, Tensor begin, "
    f"Tensor end, {schema()}, bool bias_grad) -> {RESULTS}",
)  # fmt: skip
def blocksparse_backward(
    grad: Tensor, output: Tensor, logsumexp: Tensor, query: Tensor, key: Tensor, value: Tensor, begin: Tensor,
    end: Tensor, *rest: Any,
) -> Gradients:  # fmt: skip
    """Gradients of query, key, value, bias and sinks; of the last two an empty tensor where there is none to give."""
    call, bias_grad = unflatten(rest[:-1]), rest[-1]
    if grad.numel() == 0:
        dq, dk, dv, dbias, dsinks = (torch.zeros_like(x) for x in like(query, key, value, call, bias_grad))
        return dq, dk, dv, dbias, dsinks
    with torch.autocast("cpu", enabled=False):
        grads = aten_blocks.backward(grad, query, key, value, output, logsumexp, begin, end, four_dims(call), bias_grad)
    return given(query, bias_grad, call, *grads)


@blocksparse_backward.register_fake
def _(
    grad: Tensor, output: Tensor, logsumexp: Tensor, query: Tensor, key: Tensor, value: Tensor, begin: Tensor,
    end: Tensor, *rest: Any,
) -> Gradients:  # fmt: skip
    return like(query, key, value, unflatten(rest[:-1]), rest[-1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.static = split(inputs, 5)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*output, *tensors)


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    grads = blocksparse_backward(grad, *ctx.saved_tensors, *ctx.static, unflatten(needs[5:]).bias)
    return for_autograd(needs, grads, 5)


blocksparse_forward.register_autograd(_backward, setup_context=_setup)
