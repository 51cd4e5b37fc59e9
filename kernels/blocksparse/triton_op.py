"""Block-sparse attention in Triton, forward and backward, for CUDA (compute capability 8.0 and later) and ROCm.

The definition is native.py. Nothing here imports Triton until a kernel is launched; with TRITON_INTERPRET=1 set before
the first launch the kernels run on CPU tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.attention.call import AttentionCall, flatten, schema, unflatten
from easytorch.kernels.attention.operators import RESULTS, Gradients, for_autograd, like, split
from easytorch.kernels.attention.triton_flash import MAX_HEAD_DIM, check_launch, sink_weights, supports
from easytorch.kernels.blocksparse.contract import resolve
from easytorch.kernels.blocksparse.structure import Structure, within_segments
from easytorch.kernels.interop.triton_devices import TOO_OLD, architecture_of

__all__ = ["MAX_HEAD_DIM", "blocksparse_attention", "supports"]


def blocksparse_attention(query: Tensor, key: Tensor, value: Tensor, **features: Any) -> Tensor:
    """(B, T, H, D), (B, S, K, D), (B, S, K, Dv) -> (B, T, H, Dv), differentiable in query, key, value, bias and sinks.

    float32, float16, bfloat16; scores and sums are float32. The gradient of `bias`, when asked for, is computed as
    float32 (B, H, T, S) and then summed to its shape. Raises `ValueError` for tensors that do not fit the contract or
    that `supports` refuses, `ImportError` without Triton. Not differentiable twice.
    """
    call, rule = resolve(query, key, value, **features)
    check_launch("triton block-sparse attention", query, key, value)
    structure = rule.structure(query.shape[1], key.shape[1], query.device)
    call = call.seed_on(query.device)._replace(left=structure.left, right=structure.right)
    return _forward(query, key, value, structure.begin, structure.end, *flatten(call))[0]


@torch.library.custom_op(
    "easytorch::triton_blocksparse_forward", mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, Tensor begin, Tensor end, {schema()}) -> (Tensor, Tensor)",
)  # fmt: skip
def _forward(
    query: Tensor, key: Tensor, value: Tensor, begin: Tensor, end: Tensor, *fields: Any
) -> tuple[Tensor, Tensor]:
    """output (B, T, H, Dv), lse (B, H, 2, T) float32. begin, end, and the band of the call: structure.py."""
    from easytorch.kernels.blocksparse import triton_calls as calls

    call = unflatten(fields)
    structure = _narrowed(begin, end, call)
    output, lse = _forward_fake(query, key, value)
    calls.forward_call(_architecture(query), (query, key, value), output, lse, structure, call).launch()
    return output, lse


@_forward.register_fake
def _forward_fake(query: Tensor, key: Tensor, value: Tensor, *fields: Any) -> tuple[Tensor, Tensor]:
    batch, length, heads, _ = query.shape
    output = torch.empty((batch, length, heads, value.shape[3]), dtype=query.dtype, device=query.device)
    return output, torch.empty((batch, heads, 2, length), dtype=torch.float32, device=query.device)


@torch.library.custom_op(
    "easytorch::triton_blocksparse_backward", mutates_args=(),
    schema="(Tensor grad, Tensor output, Tensor lse, Tensor query, Tensor key, Tensor value, Tensor begin, Tensor end, "
    f"{schema()}, bool bias_grad) -> {RESULTS}",
)  # fmt: skip
def _backward(
    grad: Tensor, output: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, begin: Tensor, end: Tensor,
    *rest: Any,
) -> Gradients:  # fmt: skip
    """The gradients of query, key, value, bias and sinks; the last two are empty when there is none to give."""
    from easytorch.kernels.attention.triton_flash_calls import delta_call
    from easytorch.kernels.blocksparse import triton_calls as calls

    call, wants_bias = unflatten(rest[:-1]), rest[-1]
    structure = _narrowed(begin, end, call)
    architecture, heads = _architecture(query), (query, key, value)
    # contiguous for any strides of the input, which may overlap
    dq, dk, dv, bias_grad, sinks_grad = like(query, key, value, call, wants_bias)
    delta = torch.empty_like(lse[:, :, 0])
    delta_call(output, grad, delta).launch()
    calls.key_value_grad_call(architecture, heads, grad, lse, delta, dk, dv, structure, call).launch()
    scores_grad = None
    of_rows = call.bias is not None and call.bias.shape[-1] == 1  # logsumexp.sink_share
    if wants_bias and not of_rows:
        # zeros: empty blocks are never visited
        scores_grad = torch.zeros((*delta.shape, key.shape[1]), dtype=torch.float32, device=query.device)
    calls.query_grad_call(architecture, heads, grad, lse, delta, dq, scores_grad, structure, call).launch()
    if scores_grad is not None:
        bias_grad.copy_(scores_grad.sum_to_size(bias_grad.shape))
    share = torch.zeros_like(delta) if call.sinks is None else sink_weights(call, lse) * delta
    if wants_bias and of_rows:
        bias_grad.copy_(share[..., None].sum_to_size(bias_grad.shape))
    if call.sinks is not None:
        sinks_grad.copy_(-share.sum(dim=(0, 2)))
    return dq, dk, dv, bias_grad, sinks_grad


@_backward.register_fake
def _backward_fake(
    grad: Tensor, output: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, begin: Tensor, end: Tensor,
    *rest: Any,
) -> Gradients:  # fmt: skip
    return like(query, key, value, unflatten(rest[:-1]), rest[-1])


def _narrowed(begin: Tensor, end: Tensor, call: AttentionCall) -> Structure:
    structure = Structure(begin, end, call.left, call.right)
    # the kernels compare ids anyway: knowing that the intervals suffice would need a device synchronization
    if call.query_segment_ids is None or call.key_segment_ids is None:
        return structure
    return within_segments(structure, call.query_segment_ids, call.key_segment_ids)[0]


def _architecture(query: Tensor) -> str:
    architecture = architecture_of(query.device)
    if architecture is None:
        raise ValueError(f"triton block-sparse attention: {TOO_OLD}")
    return architecture


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.numbers = split(inputs, 5)
    ctx.save_for_backward(*output, *tensors)


def _autograd(ctx: Any, grad: Tensor, lse_grad: Tensor | None) -> tuple[Any, ...]:
    needs = ctx.needs_input_grad
    grads = _backward(grad, *ctx.saved_tensors, *ctx.numbers, unflatten(needs[5:]).bias)
    return for_autograd(needs, grads, 5)


_forward.register_autograd(_autograd, setup_context=_setup_context)
