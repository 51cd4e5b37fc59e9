"""xla_flash.py as torch operators: `easytorch::xla_flash_forward` and `_backward`, on the CPU, through DLPack.

They work under autograd, torch.compile (no graph break) and torch.export. jax is imported when one of them first runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.attention.contract import band_of, check_features, check_tensors
from easytorch.kernels.attention.dropout import draw_seed


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    query_segment_ids: Tensor | None = None,
    key_segment_ids: Tensor | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    seed: int | Tensor | None = None,
) -> Tensor:
    """(B, T, H, D), (B, S, K, D), (B, S, K, Dv) -> (B, T, H, Dv), in the query's dtype, computed in float32."""
    dim = check_tensors(query, key, value)[5]
    check_features(
        query, key, mask=mask, bias=bias, query_segment_ids=query_segment_ids, key_segment_ids=key_segment_ids,
        softcap=softcap, sinks=sinks, dropout_prob=dropout_prob,
    )  # fmt: skip
    left, right = band_of(causal, sliding_window)
    seed_tensor = None
    if dropout_prob > 0.0:
        seed_tensor = torch.as_tensor(draw_seed() if seed is None else seed, dtype=torch.int64)
    return xla_flash_forward(
        query, key, value, mask, bias, query_segment_ids, key_segment_ids, sinks, seed_tensor,
        dim**-0.5 if softmax_scale is None else float(softmax_scale), left, right,
        None if softcap is None else float(softcap), dropout_prob,
    )[0]  # fmt: skip


@torch.library.custom_op("easytorch::xla_flash_forward", mutates_args=(), device_types="cpu")
def xla_flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    query_segment_ids: Tensor | None,
    key_segment_ids: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    scale: float,
    left: int | None,
    right: int | None,
    softcap: float | None,
    dropout_prob: float,
) -> tuple[Tensor, Tensor]:
    """Output (B, T, H, Dv) and float32 logsumexp (B, H, T); the arguments of `xla_flash.flash_forward`."""
    from easytorch.kernels.interop.dlpack import to_torch

    arrays = _arrays(query, key, value, mask, bias, query_segment_ids, key_segment_ids, sinks, seed)
    output, logsumexp = _jitted("flash_forward")(
        *arrays, scale=scale, left=left, right=right, softcap=softcap, dropout_prob=dropout_prob
    )
    return to_torch(output), to_torch(logsumexp)


@xla_flash_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, length, heads = query.shape[:3]
    output = query.new_empty(batch, length, heads, value.shape[3])
    return output, query.new_empty(batch, heads, length, dtype=torch.float32)


@torch.library.custom_op("easytorch::xla_flash_backward", mutates_args=(), device_types="cpu")
def xla_flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    query_segment_ids: Tensor | None,
    key_segment_ids: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    output: Tensor,
    logsumexp: Tensor,
    scale: float,
    left: int | None,
    right: int | None,
    softcap: float | None,
    dropout_prob: float,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, bias and sinks; of the last two an empty tensor where there is none to give."""
    from easytorch.kernels.interop.dlpack import to_torch

    arrays = _arrays(
        query, key, value, mask, bias, query_segment_ids, key_segment_ids, sinks, seed, output, logsumexp, grad
    )
    grads = _jitted("flash_backward")(
        *arrays, scale=scale, left=left, right=right, softcap=softcap, dropout_prob=dropout_prob, bias_grad=bias_grad
    )
    dq, dk, dv, dbias, dsinks = (
        query.new_empty(0) if grad is None else to_torch(grad) for grad in (*grads[:3], grads[4], grads[7])
    )
    return dq, dk, dv, dbias, dsinks


@xla_flash_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Any, bias: Tensor | None, query_segments: Any,
    key_segments: Any, sinks: Tensor | None, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    bias_grad = rest[-1]
    return (
        *(x.new_empty(x.shape) for x in (query, key, value)),
        query.new_empty(0) if bias is None or not bias_grad else bias.new_empty(bias.shape),
        query.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.static = inputs[:9], inputs[9:]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    needs_bias, needs_sinks = ctx.needs_input_grad[4], ctx.needs_input_grad[7]
    dq, dk, dv, dbias, dsinks = xla_flash_backward(grad, *saved, *ctx.static, needs_bias)
    tensors = (dq, dk, dv, None, dbias if needs_bias else None, None, None, dsinks if needs_sinks else None, None)
    return *tensors, *(None,) * len(ctx.static)


xla_flash_forward.register_autograd(_backward, setup_context=_setup)


def _arrays(*tensors: Tensor | None) -> list[Any]:
    """The tensors as jax arrays; integers (segment ids, seed) by their lower 32 bits."""
    from easytorch.kernels.interop.dlpack import to_jax

    return [
        None if x is None else to_jax(x.to(torch.int32) if x.dtype in (torch.int64, torch.int16, torch.uint8) else x)
        for x in tensors
    ]


@functools.lru_cache(maxsize=2)
def _jitted(name: str) -> Callable[..., Any]:
    """A function of xla_flash.py, compiled once for each signature; its arrays are on the CPU, so it runs there."""
    import jax

    from easytorch.kernels.attention import xla_flash

    static = ("scale", "left", "right", "softcap", "dropout_prob")
    function = getattr(xla_flash, name)
    return jax.jit(function, static_argnames=(*static, "bias_grad") if name == "flash_backward" else static)
