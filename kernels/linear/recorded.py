"""`linear` of a CPU in training: what ATen records, by the products of products.py, with fewer copies under autocast.

Autocast casts the input and the weight of every layer, and autograd keeps both; here the input is cast once for all
layers that share it, and the weight again in the backward pass, which takes a hundredth of its products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from easytorch.kernels.interop.definition_gradients import by_definition
from easytorch.kernels.interop.torch_func import as_given, recording, transforming
from easytorch.kernels.linear.products import WIDENED, prefers_onednn, product

# Rows and elements of a weight from which it is taken: below, the Python around it costs what it saves.
LEAST_ROWS, SMALLEST_WEIGHT = 64, 2**16
_PLAIN = (Tensor, torch.nn.Parameter)
_FLOATS = (torch.float32, torch.bfloat16)


def takes(x: Tensor) -> bool:
    """Whether `prefers` may take x, whatever the weights: what is quick to see."""
    return type(x) in _PLAIN and x.is_cpu and x.dim() > 0 and x.numel() >= LEAST_ROWS * x.shape[-1]


def prefers(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """True where `linear` takes this call, and should: autograd records it, it is large enough, and nothing traces it.

    That the weights are dense, on the CPU, of one dtype and side by side is for the caller to know.
    """
    if not takes(x) or not recording(x, *weights):
        return False
    if x.shape[-1] != weights[0].shape[1] or not as_given(elementwise=True):
        return False
    elements = sum(one.numel() for one in weights)
    if torch.is_autocast_enabled("cpu"):
        floating = x.dtype in _FLOATS and weights[0].dtype in _FLOATS
        return floating and torch.get_autocast_dtype("cpu") is torch.bfloat16 and elements >= SMALLEST_WEIGHT
    if x.dtype is not weights[0].dtype:
        return False
    return prefers_onednn(elements) if x.dtype is torch.float32 else x.dtype in WIDENED and elements >= SMALLEST_WEIGHT


def linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> Tensor:
    """x (..., K) -> (..., N), differentiable any number of times, for a call that `prefers` takes; in the dtype of
    autocast where it is enabled.

    weights (N1, K), (N2, K), ..., side by side in memory, N their rows together; biases (N1,), (N2,), ... likewise, or
    none. The gradients are of each by itself.
    """
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    rows: Tensor = _Linear.apply(x.to(dtype).reshape(-1, x.shape[-1]), len(weights), *weights, *biases)
    # out here: the view that an `autograd.Function` returns may not be changed in place, as a layer's output may
    return rows.view(*x.shape[:-1], rows.shape[-1])


class _Linear(torch.autograd.Function):
    """x (M, K) -> (M, N). Gradients of every order, after the first the definition's; those of x and of the weights
    know no bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, *parameters: Tensor) -> Tensor:
        weights, biases = parameters[:count], parameters[count:]
        ctx.save_for_backward(x, *weights)
        ctx.biases = [one.dtype for one in biases]
        joint = _joint(weights)
        with torch.autocast("cpu", enabled=False):
            bias = _joint(biases).to(x.dtype) if biases else None
            return product(x, joint.to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        of_x, _, *of_parameters = ctx.needs_input_grad
        of_weights, of_biases = of_parameters[: len(weights)], of_parameters[len(weights) :]
        sizes = [len(one) for one in weights]
        grads: list[Tensor | None] = [None] * (1 + len(weights))
        if torch.is_grad_enabled() or transforming():
            grads = by_definition(_definition, (x, *weights), (of_x, *of_weights), grad)
        else:
            if of_x:
                grads[0] = product(grad, _joint(weights).to(x.dtype).t())
            if any(of_weights):
                found = _of_weight(grad, x)
                grads[1:] = found.to(weights[0].dtype).split(sizes)
        if any(of_biases):
            grads += grad.sum(0, dtype=ctx.biases[0]).split(sizes)
        else:
            grads += [None] * len(of_biases)
        own = [one if need else None for one, need in zip(grads, (of_x, *of_parameters), strict=True)]
        return own[0], None, *own[1:]


def _of_weight(grad: Tensor, x: Tensor) -> Tensor:
    """grad (M, N).T @ x (M, K): oneDNN, which `product` asks in float32, is the slower one here (products.py)."""
    return product(grad.t(), x.t()) if x.dtype in WIDENED else grad.t() @ x


def _joint(parts: Sequence[Tensor]) -> Tensor:
    """Tensors that lie side by side as one; a copy where they no longer do, as when hooks kept them elsewhere."""
    first = parts[0].detach()
    if len(parts) == 1:
        return first
    address, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for one in parts:
        if one.data_ptr() != address or one.untyped_storage().data_ptr() != storage or not one.is_contiguous():
            return torch.cat([one.detach() for one in parts])
        address += one.nbytes
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


def _definition(x: Tensor, *weights: Tensor) -> Tensor:
    return F.linear(x, torch.cat(weights).to(x.dtype))
