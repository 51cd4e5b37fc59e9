"""Flash attention in Triton, forward and backward, for CUDA (compute capability 8.0 and later) and ROCm.

The definition is native.py, the contract contract.py. Nothing here imports Triton until a kernel is launched; with
TRITON_INTERPRET=1 set before the first launch the kernels run on CPU tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from easytorch.kernels.attention.contract import band_of, check_features, check_tensors
from easytorch.kernels.attention.dropout import draw_seed
from easytorch.kernels.interop.installed import missing
from easytorch.kernels.interop.triton_devices import TOO_OLD, architecture_of, refusal

MAX_HEAD_DIM = 256


def supports(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **features: Any) -> str | None:
    """None when `flash_attention` carries this call, else the reason. It carries every feature of the contract."""
    for name, dim in (("query and key", query.shape[-1]), ("value", value.shape[-1])):
        if not 1 <= dim <= MAX_HEAD_DIM:
            return f"the head_dim of {name} must be in 1..{MAX_HEAD_DIM}, got {dim}"
    return refusal(query.device, query.dtype)


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    causal: bool = False,
    query_segment_ids: torch.Tensor | None = None,
    key_segment_ids: torch.Tensor | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    seed: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """(B, T, H, D), (B, S, K, D), (B, S, K, Dv) -> (B, T, H, Dv), differentiable in query, key, value, bias and sinks.

    float32, float16, bfloat16; scores and sums are float32. Strides are followed and mask and bias broadcast without
    copies. The gradient of `bias`, when asked for, is formed as float32 (B, H, T, S) and then summed to its shape.
    Raises `ValueError` for tensors that do not fit the contract or that `supports` refuses, `ImportError` without
    Triton. Not differentiable twice.
    """
    dim = check_tensors(query, key, value)[5]
    check_features(
        query, key, mask=mask, bias=bias, query_segment_ids=query_segment_ids, key_segment_ids=key_segment_ids,
        softcap=softcap, sinks=sinks, dropout_prob=dropout_prob,
    )  # fmt: skip
    if (absent := missing("triton")) is not None:
        raise ImportError(absent)
    reason = supports(query, key, value)
    if reason is not None:
        raise ValueError(f"triton flash attention: {reason}")
    left, right = band_of(causal, sliding_window)
    if dropout_prob == 0.0:
        seed = None
    elif not isinstance(seed, torch.Tensor):
        seed = draw_seed() if seed is None else torch.tensor(seed & 0xFFFFFFFF, dtype=torch.int64)
    if seed is not None:
        seed = seed.to(query.device, torch.int64)
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    output, _ = _forward(
        query, key, value, bias, mask, query_segment_ids, key_segment_ids, sinks, seed, left, right, softcap, scale,
        dropout_prob,
    )  # fmt: skip
    return output


@torch.library.custom_op("easytorch::triton_flash_forward", mutates_args=())
def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, mask: torch.Tensor | None,
    query_ids: torch.Tensor | None, key_ids: torch.Tensor | None, sinks: torch.Tensor | None, seed: torch.Tensor | None,
    left: int | None, right: int | None, softcap: float | None, softmax_scale: float, dropout_prob: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """output (B, T, H, Dv), lse (B, H, T) float32. `causal` is right = 0; a seed goes with dropout_prob > 0 only."""
    from easytorch.kernels.attention.triton_flash_calls import Features, forward_call

    features = Features(bias, mask, query_ids, key_ids, sinks, seed, left, right, softcap, softmax_scale, dropout_prob)
    output, lse = _forward_fake(query, key, value)
    forward_call(_architecture(query), query, key, value, output, lse, features).launch()
    return output, lse


@_forward.register_fake
def _forward_fake(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *features: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, length, heads, _ = query.shape
    output = torch.empty((batch, length, heads, value.shape[3]), dtype=query.dtype, device=query.device)
    return output, torch.empty((batch, heads, length), dtype=torch.float32, device=query.device)


@torch.library.custom_op("easytorch::triton_flash_backward", mutates_args=())
def _backward(
    output_grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor,
    lse: torch.Tensor, bias: torch.Tensor | None, mask: torch.Tensor | None, query_ids: torch.Tensor | None,
    key_ids: torch.Tensor | None, sinks: torch.Tensor | None, seed: torch.Tensor | None, left: int | None,
    right: int | None, softcap: float | None, softmax_scale: float, dropout_prob: float, bias_needs_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients of query, key, value, bias and sinks; the last two are empty when there is none to give."""
    from easytorch.kernels.attention import triton_flash_calls as calls

    features = calls.Features(
        bias, mask, query_ids, key_ids, sinks, seed, left, right, softcap, softmax_scale, dropout_prob
    )
    architecture = _architecture(query)
    query_grad, key_grad, value_grad, bias_grad, sinks_grad = _backward_fake(
        output_grad, query, key, value, output, lse, bias, mask, query_ids, key_ids, sinks, seed, left, right, softcap,
        softmax_scale, dropout_prob, bias_needs_grad,
    )  # fmt: skip
    delta = torch.empty_like(lse)
    calls.delta_call(output, output_grad, delta).launch()
    calls.key_value_grad_call(
        architecture, query, key, value, output_grad, lse, delta, key_grad, value_grad, features
    ).launch()
    scores_grad = None
    if bias_needs_grad:
        # zeros: the blocks outside the band are never visited
        shape = (*lse.shape, key.shape[1])
        scores_grad = torch.zeros(shape, dtype=torch.float32, device=query.device)
    calls.query_grad_call(
        architecture, query, key, value, output_grad, lse, delta, query_grad, scores_grad, features
    ).launch()
    if scores_grad is not None and bias is not None:
        bias_grad.copy_(scores_grad.sum_to_size(bias.shape))
    if sinks is not None:
        weight = torch.exp(sinks.float()[:, None] - lse)
        sinks_grad.copy_(-(weight * delta).sum(dim=(0, 2)))
    return query_grad, key_grad, value_grad, bias_grad, sinks_grad


@_backward.register_fake
def _backward_fake(
    output_grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor,
    lse: torch.Tensor, bias: torch.Tensor | None, mask: torch.Tensor | None, query_ids: torch.Tensor | None,
    key_ids: torch.Tensor | None, sinks: torch.Tensor | None, seed: torch.Tensor | None, left: int | None,
    right: int | None, softcap: float | None, softmax_scale: float, dropout_prob: float, bias_needs_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    def like(tensor: torch.Tensor | None) -> torch.Tensor:
        # contiguous whatever the strides of the input: those may overlap
        source = query if tensor is None else tensor
        return torch.empty((0,) if tensor is None else tensor.shape, dtype=source.dtype, device=query.device)

    return like(query), like(key), like(value), like(bias if bias_needs_grad else None), like(sinks)


def _architecture(query: torch.Tensor) -> str:
    architecture = architecture_of(query.device)
    if architecture is None:
        raise ValueError(f"triton flash attention: {TOO_OLD}")
    return architecture


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs[:9], *output)
    ctx.numbers = inputs[9:]


def _autograd(ctx: Any, output_grad: torch.Tensor, lse_grad: torch.Tensor | None) -> tuple[Any, ...]:
    query, key, value, bias, mask, query_ids, key_ids, sinks, seed, output, lse = ctx.saved_tensors
    query_grad, key_grad, value_grad, bias_grad, sinks_grad = _backward(
        output_grad, query, key, value, output, lse, bias, mask, query_ids, key_ids, sinks, seed, *ctx.numbers,
        bias is not None and ctx.needs_input_grad[3],
    )  # fmt: skip
    return (
        query_grad, key_grad, value_grad, bias_grad if ctx.needs_input_grad[3] else None, None, None, None,
        sinks_grad if ctx.needs_input_grad[7] else None, *[None] * 6,
    )  # fmt: skip


_forward.register_autograd(_autograd, setup_context=_setup_context)
