"""native.py and grouped.py as one operator: a graph cannot follow the numbers that they read.

`easytorch::ragged_page_attention` stands in graphs of torch.compile and torch.export, on any device.
"""

from __future__ import annotations

from typing import Any

import torch

from easytorch.kernels.attention.contract import band_of
from easytorch.kernels.ragged_page import grouped, native
from easytorch.kernels.ragged_page.contract import Window, check_call, cut_to


def ragged_page_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_seqs: int | torch.Tensor | None = None,
    *,
    causal: bool = True,
    sliding_window: Window = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    softmax_dtype: torch.dtype | None = None,
    by_groups: bool = False,
) -> torch.Tensor:
    """The definition as an operator; `by_groups`: grouped.py, which takes no `softmax_dtype`."""
    check_call(
        query, key_pages, value_pages, context_lens, block_tables, query_start_loc, num_seqs, softcap=softcap,
        sinks=sinks, sliding_window=sliding_window,
    )  # fmt: skip
    left, right = band_of(causal, sliding_window)
    scale = query.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    tables = cut_to(num_seqs, context_lens, block_tables, query_start_loc)
    return _forward(
        query, key_pages, value_pages, *tables, sinks, left, right, softcap, scale, softmax_dtype, by_groups
    )


@torch.library.custom_op("easytorch::ragged_page_attention", mutates_args=())
def _forward(
    query: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor, context_lens: torch.Tensor,
    block_tables: torch.Tensor, query_start_loc: torch.Tensor, num_seqs: torch.Tensor | None,
    sinks: torch.Tensor | None, left: int | None, right: int | None, softcap: float | None, softmax_scale: float,
    softmax_dtype: torch.dtype | None, by_groups: bool,
) -> torch.Tensor:  # fmt: skip
    tensors = (query, key_pages, value_pages, context_lens, block_tables, query_start_loc, num_seqs)
    features: dict[str, Any] = {
        "causal": False, "sliding_window": (left, right), "softcap": softcap, "sinks": sinks,
        "softmax_scale": softmax_scale,
    }  # fmt: skip
    if by_groups:
        return grouped.ragged_page_attention(*tensors, **features)
    return native.ragged_page_attention(*tensors, **features, softmax_dtype=softmax_dtype)


@_forward.register_fake
def _(query: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty(*query.shape[:2], value_pages.shape[3])


@torch.library.custom_op("easytorch::ragged_page_attention_backward", mutates_args=())
def _backward(
    grad: torch.Tensor, query: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor,
    context_lens: torch.Tensor, block_tables: torch.Tensor, query_start_loc: torch.Tensor,
    num_seqs: torch.Tensor | None, sinks: torch.Tensor | None, left: int | None, right: int | None,
    softcap: float | None, softmax_scale: float, softmax_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of query, pages and sinks (empty without sinks): the definition, computed again and differentiated."""

    def definition(*leaves: torch.Tensor) -> torch.Tensor:
        return native.ragged_page_attention(
            *leaves[:3], context_lens, block_tables, query_start_loc, num_seqs, causal=False,
            sliding_window=(left, right), softcap=softcap, sinks=None if sinks is None else leaves[3],
            softmax_scale=softmax_scale, softmax_dtype=softmax_dtype,
        )  # fmt: skip

    # inside an operator autograd does not record; torch.func does
    leaves = (query, key_pages, value_pages) if sinks is None else (query, key_pages, value_pages, sinks)
    grads = [g.contiguous() for g in torch.func.vjp(definition, *leaves)[1](grad)]
    return grads[0], grads[1], grads[2], query.new_empty(0) if sinks is None else grads[3]


@_backward.register_fake
def _(
    grad: torch.Tensor, query: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, ...]:
    sinks = rest[4]
    dquery, dkeys, dvalues = (x.new_empty(x.shape) for x in (query, key_pages, value_pages))
    return dquery, dkeys, dvalues, query.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:8])
    ctx.settings = inputs[8:13]


def _autograd(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    *grads, dsinks = _backward(grad, *ctx.saved_tensors, *ctx.settings)
    return *grads, None, None, None, None, dsinks if ctx.needs_input_grad[7] else None, *(None,) * 6


_forward.register_autograd(_autograd, setup_context=_setup)
