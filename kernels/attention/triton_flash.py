"""Flash attention in Triton, forward and backward, for CUDA (compute capability 8.0 and later) and ROCm.

The definition is native.py, the contract contract.py. Nothing here imports Triton until a kernel is launched; with
TRITON_INTERPRET=1 set before the first launch the kernels run on CPU tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.attention.call import AttentionCall, flatten, schema, unflatten
from easytorch.kernels.attention.contract import resolve
from easytorch.kernels.attention.operators import RESULTS, Gradients, for_autograd, like, split
from easytorch.kernels.interop.installed import missing
from easytorch.kernels.interop.triton_devices import TOO_OLD, architecture_of, refusal

MAX_HEAD_DIM = 256


def supports(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """None when `flash_attention` carries this call, else the reason. It carries every feature of the contract."""
    for name, dim in (("query and key", query.shape[-1]), ("value", value.shape[-1])):
        if not 1 <= dim <= MAX_HEAD_DIM:
            return f"the head_dim of {name} must be in 1..{MAX_HEAD_DIM}, got {dim}"
    return refusal(query.device, query.dtype)


def flash_attention(query: Tensor, key: Tensor, value: Tensor, **features: Any) -> Tensor:
    """(B, T, H, D), (B, S, K, D), (B, S, K, Dv) -> (B, T, H, Dv), differentiable in query, key, value, bias and sinks.

    float32, float16, bfloat16; scores and sums are float32. Strides are followed and mask and bias broadcast without
    copies. The gradient of `bias`, when asked for, is computed as float32 (B, H, T, S) and then summed to its shape.
    Raises `ValueError` for tensors that do not fit the contract or that `supports` refuses, `ImportError` without
    Triton. Not differentiable twice.
    """
    call = resolve(query, key, value, **features)
    check_launch("triton flash attention", query, key, value)
    return _forward(query, key, value, *flatten(call.seed_on(query.device)))[0]


def check_launch(name: str, query: Tensor, key: Tensor, value: Tensor) -> None:
    """`ImportError` without Triton, `ValueError` for tensors that `supports` refuses."""
    if (absent := missing("triton")) is not None:
        raise ImportError(absent)
    if (reason := supports(query, key, value)) is not None:
        raise ValueError(f"{name}: {reason}")


@torch.library.custom_op(
    "easytorch::triton_flash_forward", mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, {schema()}) -> (Tensor, Tensor)",
)  # fmt: skip
def _forward(query: Tensor, key: Tensor, value: Tensor, *fields: Any) -> tuple[Tensor, Tensor]:
    """output (B, T, H, Dv), lse (B, H, 2, T) float32: logsumexp.py, in the units of the kernel's scores."""
    return flash_forward(query, key, value, unflatten(fields))


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, natural: bool | None = None
) -> tuple[Tensor, Tensor]:
    """The results of `_forward`, which records no gradient; natural: of triton_flash_calls.py."""
    from easytorch.kernels.attention.triton_flash_calls import forward_call

    output, lse = _forward_fake(query, key, value)
    forward_call(_architecture(query), query, key, value, output, lse, call, natural=natural).launch()
    return output, lse


@_forward.register_fake
def _forward_fake(query: Tensor, key: Tensor, value: Tensor, *fields: Any) -> tuple[Tensor, Tensor]:
    batch, length, heads, _ = query.shape
    output = torch.empty((batch, length, heads, value.shape[3]), dtype=query.dtype, device=query.device)
    return output, torch.empty((batch, heads, 2, length), dtype=torch.float32, device=query.device)


@torch.library.custom_op(
    "easytorch::triton_flash_backward", mutates_args=(),
    schema=f"(Tensor grad, Tensor output, Tensor lse, Tensor query, Tensor key, Tensor value, {schema()}, "
    f"bool bias_grad) -> {RESULTS}",
)  # fmt: skip
def _backward(
    grad: Tensor, output: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> Gradients:
    """The gradients of query, key, value, bias and sinks; the last two are empty when there is none to give."""
    return flash_backward(grad, output, lse, query, key, value, unflatten(rest[:-1]), rest[-1])


def flash_backward(
    grad: Tensor, output: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall,
    wants_bias: bool, natural: bool | None = None,
) -> Gradients:  # fmt: skip
    """The results of `_backward`; natural: as it was in forward."""
    from easytorch.kernels.attention import triton_flash_calls as calls

    # contiguous whatever the strides of the input: those may overlap
    query_grad, key_grad, value_grad, bias_grad, sinks_grad = like(query, key, value, call, wants_bias)
    architecture = _architecture(query)
    delta = torch.empty_like(lse[:, :, 0])
    calls.delta_call(output, grad, delta).launch()
    calls.key_value_grad_call(
        architecture, query, key, value, grad, lse, delta, key_grad, value_grad, call, natural=natural
    ).launch()
    scores_grad = None
    of_rows = call.bias is not None and call.bias.shape[-1] == 1  # logsumexp.sink_share
    if wants_bias and not of_rows:
        # zeros: the blocks outside the band are never visited
        scores_grad = torch.zeros((*delta.shape, key.shape[1]), dtype=torch.float32, device=query.device)
    calls.query_grad_call(
        architecture, query, key, value, grad, lse, delta, query_grad, scores_grad, call, natural=natural
    ).launch()
    if scores_grad is not None:
        bias_grad.copy_(scores_grad.sum_to_size(bias_grad.shape))
    share = torch.zeros_like(delta) if call.sinks is None else sink_weights(call, lse) * delta
    if wants_bias and of_rows:
        bias_grad.copy_(share[..., None].sum_to_size(bias_grad.shape))
    if call.sinks is not None:
        sinks_grad.copy_(-share.sum(dim=(0, 2)))
    return query_grad, key_grad, value_grad, bias_grad, sinks_grad


@_backward.register_fake
def _backward_fake(
    grad: Tensor, output: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> Gradients:
    return like(query, key, value, unflatten(rest[:-1]), rest[-1])


def sink_weights(call: AttentionCall, lse: Tensor) -> Tensor:
    """(B, H, T): what of each row's probability its sink takes."""
    from easytorch.kernels.attention.triton_flash_calls import LOG2E, natural_scores

    assert call.sinks is not None
    maximum, log_sum = lse.unbind(2)
    if natural_scores(call):
        return torch.exp(call.sinks.float()[:, None] - maximum - log_sum)
    return torch.exp2(call.sinks.float()[:, None] * LOG2E - maximum - log_sum)


def _architecture(query: Tensor) -> str:
    architecture = architecture_of(query.device)
    if architecture is None:
        raise ValueError(f"triton flash attention: {TOO_OLD}")
    return architecture


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.numbers = split(inputs)
    ctx.save_for_backward(*output, *tensors)


def _autograd(ctx: Any, grad: Tensor, lse_grad: Tensor | None) -> tuple[Any, ...]:
    needs = ctx.needs_input_grad
    grads = _backward(grad, *ctx.saved_tensors, *ctx.numbers, unflatten(needs[3:]).bias)
    return for_autograd(needs, grads)


_forward.register_autograd(_autograd, setup_context=_setup_context)
