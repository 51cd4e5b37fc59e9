"""native.py and grouped.py as a custom operator: they read values that tracing cannot follow.

`easytorch::ragged_page_attention` appears in graphs of torch.compile and torch.export, on any device.
"""

from __future__ import annotations

from typing import Any

import torch

from easytorch.kernels.attention.call import AttentionCall, flatten, gradients_by_field, schema, unflatten
from easytorch.kernels.attention.operators import split
from easytorch.kernels.ragged_page import grouped, native
from easytorch.kernels.ragged_page.contract import cut_to, resolve


def ragged_page_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_seqs: int | torch.Tensor | None = None,
    *,
    softmax_dtype: torch.dtype | None = None,
    by_groups: bool = False,
    **features: Any,
) -> torch.Tensor:
    """The definition as an operator; `by_groups`: grouped.py, which takes no `softmax_dtype`."""
    tables = (context_lens, block_tables, query_start_loc, num_seqs)
    call = resolve(query, key_pages, value_pages, *tables, **features)
    return over_pages(query, key_pages, value_pages, *tables, call, softmax_dtype, by_groups)


def over_pages(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_seqs: int | torch.Tensor | None,
    call: AttentionCall,
    softmax_dtype: torch.dtype | None = None,
    by_groups: bool = False,
) -> torch.Tensor:
    """`ragged_page_attention` of a resolved call."""
    tables = cut_to(num_seqs, context_lens, block_tables, query_start_loc)
    return _forward(query, key_pages, value_pages, *tables, *flatten(call), softmax_dtype, by_groups)


_ARGUMENTS = (
    "Tensor query, Tensor key_pages, Tensor value_pages, Tensor context_lens, Tensor block_tables, "
    f"Tensor query_start_loc, Tensor? num_seqs, {schema()}, ScalarType? softmax_dtype"
)
_TABLES = 7  # the tensors before those of the call


@torch.library.custom_op(
    "easytorch::ragged_page_attention", mutates_args=(), schema=f"({_ARGUMENTS}, bool by_groups) -> Tensor"
)
def _forward(*arguments: Any) -> torch.Tensor:
    query, key_pages, value_pages, context_lens, block_tables, query_start_loc, num_seqs, *fields = arguments[:-2]
    call, tables = unflatten(fields), (context_lens, block_tables, query_start_loc, num_seqs)
    softmax_dtype, by_groups = arguments[-2:]
    if by_groups:
        return grouped.over_pages(query, key_pages, value_pages, *tables, call)
    return native.over_pages(query, key_pages, value_pages, *tables, call, softmax_dtype)


@_forward.register_fake
def _(query: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty(*query.shape[:2], value_pages.shape[3])


@torch.library.custom_op(
    "easytorch::ragged_page_attention_backward", mutates_args=(),
    schema=f"(Tensor grad, {_ARGUMENTS}) -> (Tensor query, Tensor key_pages, Tensor value_pages, Tensor sinks)",
)  # fmt: skip
def _backward(grad: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, pages and sinks (empty without sinks): recomputes and differentiates the definition."""
    query, key_pages, value_pages, context_lens, block_tables, query_start_loc, num_seqs, *fields = arguments[:-1]
    call, tables = unflatten(fields), (context_lens, block_tables, query_start_loc, num_seqs)
    softmax_dtype = arguments[-1]

    def definition(*leaves: torch.Tensor) -> torch.Tensor:
        given = call._replace(sinks=None if call.sinks is None else leaves[3])
        return native.over_pages(leaves[0], leaves[1], leaves[2], *tables, given, softmax_dtype)

    # inside an operator autograd does not record; torch.func does
    leaves = (query, key_pages, value_pages, *(() if call.sinks is None else (call.sinks,)))
    grads = [g.contiguous() for g in torch.func.vjp(definition, *leaves)[1](grad)]
    return grads[0], grads[1], grads[2], query.new_empty(0) if call.sinks is None else grads[3]


@_backward.register_fake
def _(grad: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    query, sinks = arguments[0], unflatten(arguments[_TABLES:-1]).sinks
    dquery, dkeys, dvalues = (x.new_empty(x.shape) for x in arguments[:3])
    return dquery, dkeys, dvalues, query.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    tensors, numbers = split(inputs, _TABLES)
    ctx.save_for_backward(*tensors)
    ctx.settings = numbers[:-1]


def _autograd(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    *grads, dsinks = _backward(grad, *ctx.saved_tensors, *ctx.settings)
    wanted = unflatten(ctx.needs_input_grad[_TABLES:-2]).sinks
    fields = gradients_by_field({"sinks": dsinks if wanted else None})
    return *grads, *(None,) * (_TABLES - 3), *fields, None, None


_forward.register_autograd(_autograd, setup_context=_setup)
