"""aten_blocks.py as torch operators: `easytorch::blocksparse_forward` and `_backward`, on the CPU.

They work under autograd, torch.compile (no graph break) and torch.export. Not differentiable twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.attention.contract import check_features, check_tensors
from easytorch.kernels.attention.dropout import draw_seed
from easytorch.kernels.attention.native import working_dtype
from easytorch.kernels.blocksparse import aten_blocks
from easytorch.kernels.blocksparse.native import check_structure
from easytorch.kernels.blocksparse.structure import structure_of


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
    chunk_size: int | None = None,
    prefix_length: int | Tensor | None = None,
) -> Tensor:
    """(B, T, H, D), (B, S, K, D), (B, S, K, Dv) -> (B, T, H, Dv), in the query's dtype."""
    _, length, keys, _, _, dim, _ = check_tensors(query, key, value)
    check_features(
        query, key, mask=mask, bias=bias, query_segment_ids=query_segment_ids, key_segment_ids=key_segment_ids,
        softcap=softcap, sinks=sinks, dropout_prob=dropout_prob,
    )  # fmt: skip
    check_structure(query, chunk_size, prefix_length)
    begin, end, _, _ = structure_of(
        length, keys, query.device, causal=causal, sliding_window=sliding_window, chunk_size=chunk_size,
        prefix_length=prefix_length,
    )  # fmt: skip
    seed_tensor = None
    if dropout_prob > 0.0:
        seed_tensor = torch.as_tensor(draw_seed() if seed is None else seed, dtype=torch.int64)
    return blocksparse_forward(
        query, key, value, begin, end, mask, bias, query_segment_ids, key_segment_ids, sinks, seed_tensor,
        dim**-0.5 if softmax_scale is None else float(softmax_scale), None if softcap is None else float(softcap),
        float(dropout_prob),
    )[0]  # fmt: skip


@torch.library.custom_op("easytorch::blocksparse_forward", mutates_args=(), device_types="cpu")
def blocksparse_forward(
    query: Tensor, key: Tensor, value: Tensor, begin: Tensor, end: Tensor, mask: Tensor | None, bias: Tensor | None,
    query_ids: Tensor | None, key_ids: Tensor | None, sinks: Tensor | None, seed: Tensor | None, scale: float,
    softcap: float | None, dropout_prob: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output (B, T, H, Dv) and logsumexp (B, H, T) in the dtype of the softmax."""
    if 0 in (*query.shape[:3], value.shape[3]):  # no numbers come out
        batch, length, heads = query.shape[:3]
        empty = query.new_zeros(batch, length, heads, value.shape[3])
        return empty, query.new_zeros(batch, heads, length, dtype=working_dtype(query))
    features = aten_blocks.Features(
        begin, end, mask, bias, query_ids, key_ids, sinks, seed, scale, softcap, dropout_prob
    )
    with torch.autocast("cpu", enabled=False):  # it would round scores and sums
        return aten_blocks.forward(query, key, value, features)


@blocksparse_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, length, heads = query.shape[:3]
    output = query.new_empty(batch, length, heads, value.shape[3])
    return output, query.new_empty(batch, heads, length, dtype=working_dtype(query))


@torch.library.custom_op("easytorch::blocksparse_backward", mutates_args=(), device_types="cpu")
def blocksparse_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, begin: Tensor, end: Tensor, mask: Tensor | None,
    bias: Tensor | None, query_ids: Tensor | None, key_ids: Tensor | None, sinks: Tensor | None, seed: Tensor | None,
    output: Tensor, logsumexp: Tensor, scale: float, softcap: float | None, dropout_prob: float, bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key, value, bias and sinks; of the last two an empty tensor where there is none to give."""
    if grad.numel() == 0:
        dq, dk, dv, dbias, dsinks = (
            query.new_zeros(0) if x is None else x.new_zeros(x.shape) for x in (query, key, value, bias, sinks)
        )
        return dq, dk, dv, dbias if bias_grad else query.new_zeros(0), dsinks
    features = aten_blocks.Features(
        begin, end, mask, bias, query_ids, key_ids, sinks, seed, scale, softcap, dropout_prob
    )
    with torch.autocast("cpu", enabled=False):
        dq, dk, dv, *rest = aten_blocks.backward(grad, query, key, value, output, logsumexp, features, bias_grad)
    dbias, dsinks = (query.new_empty(0) if x is None else x for x in rest)
    return dq, dk, dv, dbias, dsinks


@blocksparse_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, begin: Tensor, end: Tensor, mask: Tensor | None,
    bias: Tensor | None, query_ids: Tensor | None, key_ids: Tensor | None, sinks: Tensor | None, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    return (
        *(x.new_empty(x.shape) for x in (query, key, value)),
        query.new_empty(0) if bias is None or not rest[-1] else bias.new_empty(bias.shape),
        query.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.static = inputs[:11], inputs[11:]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    needs_bias, needs_sinks = ctx.needs_input_grad[6], ctx.needs_input_grad[9]
    dq, dk, dv, dbias, dsinks = blocksparse_backward(grad, *ctx.saved_tensors, *ctx.static, needs_bias)
    return (
        dq, dk, dv, None, None, None, dbias if needs_bias else None, None, None, dsinks if needs_sinks else None, None,
        *(None,) * len(ctx.static),
    )  # fmt: skip


blocksparse_forward.register_autograd(_backward, setup_context=_setup)
