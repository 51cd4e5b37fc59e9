"""Block-sparse attention in Triton, forward and backward, for CUDA (compute capability 8.0 and later) and ROCm.

The definition is native.py. Nothing here imports Triton until a kernel is launched; with TRITON_INTERPRET=1 set before
the first launch the kernels run on CPU tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.attention.contract import check_features, check_tensors
from easytorch.kernels.attention.dropout import draw_seed
from easytorch.kernels.attention.triton_flash import MAX_HEAD_DIM, supports
from easytorch.kernels.blocksparse.native import check_structure
from easytorch.kernels.blocksparse.structure import Structure, structure_of, within_segments
from easytorch.kernels.interop.installed import missing
from easytorch.kernels.interop.triton_devices import TOO_OLD, architecture_of

__all__ = ["MAX_HEAD_DIM", "blocksparse_attention", "supports"]


def blocksparse_attention(
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
    chunk_size: int | None = None,
    prefix_length: int | Tensor | None = None,
) -> Tensor:
    """(B, T, H, D), (B, S, K, D), (B, S, K, Dv) -> (B, T, H, Dv), differentiable in query, key, value, bias and sinks.

    float32, float16, bfloat16; scores and sums are float32. The gradient of `bias`, when asked for, is formed as
    float32 (B, H, T, S) and then summed to its shape. Raises `ValueError` for tensors that do not fit the contract or
    that `supports` refuses, `ImportError` without Triton. Not differentiable twice.
    """
    _, length, keys, _, _, dim, _ = check_tensors(query, key, value)
    check_features(
        query, key, mask=mask, bias=bias, query_segment_ids=query_segment_ids, key_segment_ids=key_segment_ids,
        softcap=softcap, sinks=sinks, dropout_prob=dropout_prob,
    )  # fmt: skip
    check_structure(query, chunk_size, prefix_length)
    if (absent := missing("triton")) is not None:
        raise ImportError(absent)
    reason = supports(query, key, value)
    if reason is not None:
        raise ValueError(f"triton block-sparse attention: {reason}")
    begin, end, left, right = structure_of(
        length, keys, query.device, causal=causal, sliding_window=sliding_window, chunk_size=chunk_size,
        prefix_length=prefix_length,
    )  # fmt: skip
    if dropout_prob == 0.0:
        seed = None
    elif not isinstance(seed, Tensor):
        seed = draw_seed() if seed is None else torch.tensor(seed & 0xFFFFFFFF, dtype=torch.int64)
    output, _ = _forward(
        query, key, value, begin, end, bias, mask, query_segment_ids, key_segment_ids, sinks,
        None if seed is None else seed.to(query.device, torch.int64), left, right, softcap,
        dim**-0.5 if softmax_scale is None else softmax_scale, dropout_prob,
    )  # fmt: skip
    return output


@torch.library.custom_op("easytorch::triton_blocksparse_forward", mutates_args=())
def _forward(
    query: Tensor, key: Tensor, value: Tensor, begin: Tensor, end: Tensor, bias: Tensor | None, mask: Tensor | None,
    query_ids: Tensor | None, key_ids: Tensor | None, sinks: Tensor | None, seed: Tensor | None, left: int | None,
    right: int | None, softcap: float | None, softmax_scale: float, dropout_prob: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """output (B, T, H, Dv), lse (B, H, T) float32. begin, end, left, right: structure.py."""
    from easytorch.kernels.blocksparse import triton_blocksparse_calls as calls

    structure = _narrowed(Structure(begin, end, left, right), query_ids, key_ids)
    features = calls.Features(
        bias, mask, query_ids, key_ids, sinks, seed, None, None, softcap, softmax_scale, dropout_prob
    )
    output, lse = _forward_fake(query, key, value)
    calls.forward_call(_architecture(query), (query, key, value), output, lse, structure, features).launch()
    return output, lse


@_forward.register_fake
def _forward_fake(query: Tensor, key: Tensor, value: Tensor, *features: Any) -> tuple[Tensor, Tensor]:
    batch, length, heads, _ = query.shape
    output = torch.empty((batch, length, heads, value.shape[3]), dtype=query.dtype, device=query.device)
    return output, torch.empty((batch, heads, length), dtype=torch.float32, device=query.device)


@torch.library.custom_op("easytorch::triton_blocksparse_backward", mutates_args=())
def _backward(
    output_grad: Tensor, query: Tensor, key: Tensor, value: Tensor, begin: Tensor, end: Tensor, output: Tensor,
    lse: Tensor, bias: Tensor | None, mask: Tensor | None, query_ids: Tensor | None, key_ids: Tensor | None,
    sinks: Tensor | None, seed: Tensor | None, left: int | None, right: int | None, softcap: float | None,
    softmax_scale: float, dropout_prob: float, bias_needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of query, key, value, bias and sinks; the last two are empty when there is none to give."""
    from easytorch.kernels.blocksparse import triton_blocksparse_calls as calls

    structure = _narrowed(Structure(begin, end, left, right), query_ids, key_ids)
    features = calls.Features(
        bias, mask, query_ids, key_ids, sinks, seed, None, None, softcap, softmax_scale, dropout_prob
    )
    architecture, given = _architecture(query), (query, key, value)
    grads = (_empty(query, query), _empty(query, key), _empty(query, value))
    bias_grad, sinks_grad = _empty(query, bias if bias_needs_grad else None), _empty(query, sinks)
    delta = torch.empty_like(lse)
    calls.delta_call(output, output_grad, delta).launch()
    calls.key_value_grad_call(architecture, given, output_grad, lse, delta, *grads[1:], structure, features).launch()
    scores_grad = None
    if bias_needs_grad:
        # zeros: empty blocks are never visited
        scores_grad = torch.zeros((*lse.shape, key.shape[1]), dtype=torch.float32, device=query.device)
    calls.query_grad_call(
        architecture, given, output_grad, lse, delta, grads[0], scores_grad, structure, features
    ).launch()
    if scores_grad is not None and bias is not None:
        bias_grad.copy_(scores_grad.sum_to_size(bias.shape))
    if sinks is not None:
        weight = torch.exp(sinks.float()[:, None] - lse)
        sinks_grad.copy_(-(weight * delta).sum(dim=(0, 2)))
    return *grads, bias_grad, sinks_grad


@_backward.register_fake
def _backward_fake(
    output_grad: Tensor, query: Tensor, key: Tensor, value: Tensor, begin: Tensor, end: Tensor, output: Tensor,
    lse: Tensor, bias: Tensor | None, mask: Tensor | None, query_ids: Tensor | None, key_ids: Tensor | None,
    sinks: Tensor | None, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    given = (query, key, value, bias if rest[-1] else None, sinks)
    dq, dk, dv, dbias, dsinks = (_empty(query, x) for x in given)
    return dq, dk, dv, dbias, dsinks


def _empty(query: Tensor, like: Tensor | None) -> Tensor:
    """Contiguous whatever the strides of the input: those may overlap."""
    source = query if like is None else like
    return torch.empty((0,) if like is None else like.shape, dtype=source.dtype, device=query.device)


def _narrowed(structure: Structure, query_ids: Tensor | None, key_ids: Tensor | None) -> Structure:
    # the kernels compare ids all the same: whether the intervals say it all is not known here without waiting
    if query_ids is None or key_ids is None:
        return structure
    return within_segments(structure, query_ids, key_ids)[0]


def _architecture(query: Tensor) -> str:
    architecture = architecture_of(query.device)
    if architecture is None:
        raise ValueError(f"triton block-sparse attention: {TOO_OLD}")
    return architecture


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:11], *output)
    ctx.numbers = inputs[11:]


def _autograd(ctx: Any, output_grad: Tensor, lse_grad: Tensor | None) -> tuple[Any, ...]:
    *given, bias, mask, query_ids, key_ids, sinks, seed, output, lse = ctx.saved_tensors
    needs_bias, needs_sinks = ctx.needs_input_grad[5], ctx.needs_input_grad[9]
    dq, dk, dv, dbias, dsinks = _backward(
        output_grad, *given, output, lse, bias, mask, query_ids, key_ids, sinks, seed, *ctx.numbers,
        bias is not None and needs_bias,
    )  # fmt: skip
    return (
        dq, dk, dv, None, None, dbias if needs_bias else None, None, None, None, dsinks if needs_sinks else None, None,
        *[None] * len(ctx.numbers),
    )  # fmt: skip


_forward.register_autograd(_autograd, setup_context=_setup_context)
