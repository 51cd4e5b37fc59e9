"""aten_flash.py as torch operators: `easytorch::aten_flash_forward` and `_backward`, on the CPU.

`attention` works under autograd, to any order (beyond the first, and in forward mode, by blocked.py), torch.func,
torch.compile (no graph break) and torch.export; vmap loops over the batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.attention import aten_flash, blocked
from easytorch.kernels.attention.call import (
    DIFFERENTIABLE,
    AttentionCall,
    flatten,
    gradients_by_field,
    schema,
    unflatten,
)
from easytorch.kernels.attention.contract import resolve
from easytorch.kernels.attention.layout import four_dims
from easytorch.kernels.attention.operators import RESULTS, Gradients, for_autograd, given, like, split
from easytorch.kernels.interop.torch_func import forward_mode, transforming


def attention(query: Tensor, key: Tensor, value: Tensor, **features: Any) -> Tensor:
    """(B, T, H, D), (B, S, K, D), (B, S, K, Dv) -> (B, T, H, Dv), in the query's dtype."""
    return by_operator(query, key, value, resolve(query, key, value, **features))


def by_operator(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
    """`attention` for a resolved call."""
    if forward_mode():
        return blocked.blockwise(query, key, value, call)
    # a tracer needs the plain operator: the autograd.Function around it neither exports nor compiles without a gradient
    run = _Flash.apply if transforming() else aten_flash_forward
    return run(query, key, value, *flatten(call))


@torch.library.custom_op(
    "easytorch::aten_flash_forward", mutates_args=(), device_types="cpu",
    schema=f"(Tensor query, Tensor key, Tensor value, {schema()}) -> Tensor",
)  # fmt: skip
def aten_flash_forward(query: Tensor, key: Tensor, value: Tensor, *fields: Any) -> Tensor:
    """Output (B, T, H, Dv)."""
    if key.numel() == 0 or query.numel() == 0 or value.numel() == 0:
        return query.new_zeros(*query.shape[:3], value.shape[3])
    return aten_flash.flash_forward(query, key, value, four_dims(unflatten(fields)))


@aten_flash_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty(*query.shape[:3], value.shape[3])


@torch.library.custom_op(
    "easytorch::aten_flash_backward", mutates_args=(), device_types="cpu",
    schema=f"(Tensor grad, Tensor query, Tensor key, Tensor value, {schema()}, bool bias_grad) -> {RESULTS}",
)  # fmt: skip
def aten_flash_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Gradients:
    """Gradients of query, key, value, bias and sinks; of the last two an empty tensor where there is none to give."""
    call, bias_grad = unflatten(rest[:-1]), rest[-1]
    if key.numel() == 0 or query.numel() == 0 or value.numel() == 0:
        zeros = (torch.zeros_like(x) for x in like(query, key, value, call, bias_grad))
        return tuple(zeros)
    grads = aten_flash.flash_backward(grad, query, key, value, four_dims(call), bias_grad)
    return given(query, bias_grad, call, *grads)


@aten_flash_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Gradients:
    return like(query, key, value, unflatten(rest[:-1]), rest[-1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensors, ctx.static = split(inputs)
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    # autograd asks for a graph of the gradients themselves, or torch.func, which always does
    run = _Gradients.apply if torch.is_grad_enabled() and not torch.compiler.is_compiling() else aten_flash_backward
    needs = ctx.needs_input_grad
    bias_grad = unflatten(needs[3:]).bias
    return for_autograd(needs, run(grad, *ctx.saved_tensors, *ctx.static, bias_grad))


aten_flash_forward.register_autograd(_gradients, setup_context=_keep)


class _Flash(torch.autograd.Function):
    """The same gradient for torch.func, which ignores a gradient registered with an operator."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        with torch.no_grad():  # torch.func leaves it on here
            return aten_flash_forward(*arguments)

    setup_context = staticmethod(_keep)
    backward = staticmethod(_gradients)


class _Gradients(torch.autograd.Function):
    """`aten_flash_backward`, whose own gradient is that of the definition, which computes all scores."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return aten_flash_backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        tensors, ctx.static = split(inputs, 4)
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        grad, query, key, value, *tensors = ctx.saved_tensors
        *numbers, bias_grad = ctx.static
        call = unflatten((*tensors, *numbers))
        leaves: dict[str, Tensor] = {"query": query, "key": key, "value": value}
        for name in DIFFERENTIABLE:
            if getattr(call, name) is not None and (bias_grad or name != "bias"):
                leaves[name] = getattr(call, name)

        def attend(leaves: dict[str, Tensor]) -> Tensor:
            fields: dict[str, Any] = {name: leaf for name, leaf in leaves.items() if name in DIFFERENTIABLE}
            return blocked.blockwise(leaves["query"], leaves["key"], leaves["value"], call._replace(**fields))

        def gradients(grad: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
            return torch.func.vjp(attend, leaves)[1](grad)[0]

        of_results = dict(zip(("query", "key", "value", *DIFFERENTIABLE), cotangents, strict=True))
        of_grad, found = torch.func.vjp(gradients, grad, leaves)[1]({name: of_results[name] for name in leaves})
        return of_grad, found["query"], found["key"], found["value"], *gradients_by_field(found), None


def _in_turn(operator: Any) -> Any:
    """A batching rule that runs the operator for each entry of the batch."""

    def rule(info: Any, dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        results = [
            operator(*(x if d is None else x.select(d, i) for x, d in zip(arguments, dims, strict=True)))
            for i in range(info.batch_size)
        ]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        return tuple(torch.stack(parts) for parts in zip(*results, strict=True)), (0,) * len(results[0])

    return rule


aten_flash_forward.register_vmap(_in_turn(aten_flash_forward))
aten_flash_backward.register_vmap(_in_turn(aten_flash_backward))
