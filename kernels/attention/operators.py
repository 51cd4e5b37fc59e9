"""What the custom operators of the attention kernels share: the shapes and the order of their gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from easytorch.kernels.attention.call import TENSORS, AttentionCall, gradients_by_field, unflatten

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

RESULTS = "(Tensor query, Tensor key, Tensor value, Tensor bias, Tensor sinks)"  # of a backward operator


def given(query: Tensor, bias_grad: bool, call: AttentionCall, *grads: Tensor | None) -> Gradients:
    """Gradients of query, key, value, bias and sinks as an operator returns them: each in the dtype and shape of its
    tensor, of the last two an empty tensor where there is none to give."""
    *others, bias, sinks = grads
    dq, dk, dv = others
    assert dq is not None and dk is not None and dv is not None
    return (
        dq, dk, dv,
        query.new_empty(0) if bias is None or not bias_grad else _fitting(bias, call.bias),
        query.new_empty(0) if sinks is None else _fitting(sinks, call.sinks),
    )  # fmt: skip


def _fitting(grad: Tensor, tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "a gradient of a tensor that the call does not have"
    return grad.to(tensor.dtype).reshape(tensor.shape)


def like(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, bias_grad: bool) -> Gradients:
    """Empty contiguous tensors of the shapes and dtypes that `given` returns."""
    bias = call.bias if bias_grad else None
    dq, dk, dv, dbias, dsinks = (
        query.new_empty(0) if x is None else x.new_empty(x.shape) for x in (query, key, value, bias, call.sinks)
    )
    return dq, dk, dv, dbias, dsinks


def for_autograd(needs: tuple[bool, ...], grads: Gradients, first: int = 3) -> tuple[Tensor | None, ...]:
    """The gradients of an operator's arguments: query, key, value, and the call from the place `first` on."""
    wanted = unflatten(needs[first : first + len(AttentionCall._fields)])
    dq, dk, dv, bias, sinks = grads
    fields = gradients_by_field({"bias": bias if wanted.bias else None, "sinks": sinks if wanted.sinks else None})
    between = (None,) * (first - 3)
    rest = (None,) * (len(needs) - first - len(fields))
    return dq, dk, dv, *between, *fields, *rest


def split(arguments: tuple[Any, ...], first: int = 3) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The tensors among an operator's arguments, whose call begins at the place `first`, and the numbers after them."""
    return arguments[: first + TENSORS], arguments[first + TENSORS :]
