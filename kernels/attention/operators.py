"""Shared code of the attention kernels' custom operators: the shapes and the order of their gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from easytorch.kernels.attention.call import DIFFERENTIABLE, TENSORS, AttentionCall, gradients_by_field, unflatten

Gradients = tuple[Tensor, ...]  # of query, key, value, and the fields that `DIFFERENTIABLE` names

RESULTS = f"({', '.join(f'Tensor {name}' for name in ('query', 'key', 'value', *DIFFERENTIABLE))})"


def given(query: Tensor, bias_grad: bool, call: AttentionCall, *grads: Tensor | None) -> Gradients:
    """Gradients as a backward operator returns them: each in the dtype and shape of its tensor, of a field an empty
    tensor where there is none to give."""
    results = []
    for grad, tensor in zip(grads[3:], _wanted(call, bias_grad), strict=True):
        if grad is None or tensor is None:
            results.append(query.new_empty(0))
        else:
            results.append(grad.to(tensor.dtype).reshape(tensor.shape))
    query_grad, key_grad, value_grad = grads[:3]
    assert query_grad is not None and key_grad is not None and value_grad is not None
    return query_grad, key_grad, value_grad, *results


def like(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, bias_grad: bool) -> Gradients:
    """Empty contiguous tensors of the shapes and dtypes that `given` returns."""
    wanted = (query, key, value, *_wanted(call, bias_grad))
    return tuple(query.new_empty(0) if x is None else x.new_empty(x.shape) for x in wanted)


def _wanted(call: AttentionCall, bias_grad: bool) -> tuple[Tensor | None, ...]:
    """The fields that get a gradient; a bias only with `bias_grad`: its gradient may be as large as the scores."""
    return tuple(getattr(call, name) if bias_grad or name != "bias" else None for name in DIFFERENTIABLE)


def for_autograd(needs: tuple[bool, ...], grads: Gradients, first: int = 3) -> tuple[Tensor | None, ...]:
    """The gradients of an operator's arguments: query, key, value, and the call from the place `first` on."""
    wanted = unflatten(needs[first : first + len(AttentionCall._fields)])
    named = zip(DIFFERENTIABLE, grads[3:], strict=True)
    fields = gradients_by_field({name: grad for name, grad in named if getattr(wanted, name)})
    between = (None,) * (first - 3)
    rest = (None,) * (len(needs) - first - len(fields))
    return *grads[:3], *between, *fields, *rest


def split(arguments: tuple[Any, ...], first: int = 3) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The tensors among an operator's arguments, whose call begins at the place `first`, and the numbers after them."""
    return arguments[: first + TENSORS], arguments[first + TENSORS :]
