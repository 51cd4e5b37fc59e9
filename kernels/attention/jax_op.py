"""jax_flash.py as torch operators: `easytorch::jax_flash_forward` and `_backward`, on the CPU, through DLPack.

They work under autograd, torch.compile (no graph break) and torch.export. jax is imported when one of them first runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.attention.call import (
    AttentionCall,
    flatten,
    map_tensors,
    schema,
    unflatten,
)
from easytorch.kernels.attention.contract import resolve
from easytorch.kernels.attention.operators import RESULTS, Gradients, for_autograd, like, split


def attention(query: Tensor, key: Tensor, value: Tensor, **features: Any) -> Tensor:
    """(B, T, H, D), (B, S, K, D), (B, S, K, Dv) -> (B, T, H, Dv), in the query's dtype, computed in float32."""
    call = resolve(query, key, value, **features)
    return jax_flash_forward(query, key, value, *flatten(call))[0]


@torch.library.custom_op(
    "easytorch::jax_flash_forward", mutates_args=(), device_types="cpu",
    schema=f"(Tensor query, Tensor key, Tensor value, {schema()}) -> (Tensor, Tensor)",
)  # fmt: skip
def jax_flash_forward(query: Tensor, key: Tensor, value: Tensor, *fields: Any) -> tuple[Tensor, Tensor]:
    """Output (B, T, H, Dv) and float32 logsumexp (B, H, 2, T)."""
    from easytorch.kernels.interop.dlpack import to_torch

    output, logsumexp = _jitted("flash_forward")(*map(_array, (query, key, value)), _for_jax(fields))
    return to_torch(output), to_torch(logsumexp)


@jax_flash_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, length, heads = query.shape[:3]
    output = query.new_empty(batch, length, heads, value.shape[3])
    return output, query.new_empty(batch, heads, 2, length, dtype=torch.float32)


@torch.library.custom_op(
    "easytorch::jax_flash_backward", mutates_args=(), device_types="cpu",
    schema=f"(Tensor grad, Tensor output, Tensor logsumexp, Tensor query, Tensor key, Tensor value, {schema()}, "
    f"bool bias_grad) -> {RESULTS}",
)  # fmt: skip
def jax_flash_backward(
    grad: Tensor, output: Tensor, logsumexp: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> Gradients:
    """Gradients of query, key, value, bias and sinks; of the last two an empty tensor where there is none to give."""
    from easytorch.kernels.interop.dlpack import to_torch

    heads, results = map(_array, (query, key, value)), map(_array, (output, logsumexp, grad))
    grads = _jitted("flash_backward")(*heads, _for_jax(rest[:-1]), *results, bias_grad=rest[-1])
    dq, dk, dv, dbias, dsinks = (query.new_empty(0) if grad is None else to_torch(grad) for grad in grads)
    return dq, dk, dv, dbias, dsinks


@jax_flash_backward.register_fake
def _(
    grad: Tensor, output: Tensor, logsumexp: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> Gradients:
    return like(query, key, value, unflatten(rest[:-1]), rest[-1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.static = split(inputs)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*output, *tensors)


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    grads = jax_flash_backward(grad, *ctx.saved_tensors, *ctx.static, unflatten(needs[3:]).bias)
    return for_autograd(needs, grads)


jax_flash_forward.register_autograd(_backward, setup_context=_setup)


def _for_jax(fields: tuple[Any, ...]) -> AttentionCall:
    return map_tensors(unflatten(fields), lambda _, x: _array(x))


def _array(x: Tensor) -> Any:
    """A tensor as a jax array; integers (segment ids, seed) by their lower 32 bits."""
    from easytorch.kernels.interop.dlpack import to_jax

    return to_jax(x.to(torch.int32) if x.dtype in (torch.int64, torch.int16, torch.uint8) else x)


@functools.lru_cache(maxsize=2)
def _jitted(name: str) -> Callable[..., Any]:
    """A function of jax_flash.py, compiled once for each signature; its arrays are on the CPU, so it runs there."""
    import jax

    from easytorch.kernels.attention import jax_flash

    return jax.jit(getattr(jax_flash, name), static_argnames=("bias_grad",) if name == "flash_backward" else ())
