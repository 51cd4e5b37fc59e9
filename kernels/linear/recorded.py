"""`linear` of a CPU in training: what ATen records, with oneDNN's products in float32 and fewer copies under autocast.

Autocast casts the input and the weight of every layer, and autograd keeps both; here the input is cast once for all
layers that share it, and the weight again in the backward pass, which takes a hundredth of its products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from easytorch.kernels.cpu import processor
from easytorch.kernels.interop.definition_gradients import by_definition
from easytorch.kernels.interop.torch_func import as_given, recording, transforming

# Rows and elements of a weight from which it is taken: below, the Python around it costs what it saves.
LEAST_ROWS, SMALLEST_WEIGHT = 64, 2**16
# Elements of a float32 weight from which oneDNN is asked in training, on AMD's CPUs. Time over MKL's, 1024 rows, one
# thread of an EPYC (Zen 4), torch 2.13:
#
#     weight (N, K)      (384, 384)  (1024, 384)  (2048, 384)  (384, 1024)  (32000, 384)
#     output               0.91         0.73         0.90         0.78         1.01; 256 rows 0.71, 512 rows 0.86
#     gradient of x        0.87         0.70         0.89         0.73         0.94
#     gradient of weight   1.10         1.04         0.93         0.98         1.36
ONEDNN_WEIGHT = 2**17
_ONEDNN = torch.backends.mkldnn.is_available() and processor.VENDOR == "AuthenticAMD"
_PLAIN = (Tensor, torch.nn.Parameter)
_FLOATS = (torch.float32, torch.bfloat16)


def prefers(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """True where `linear` takes this call, and should: autograd records it, it is large enough, and nothing traces it.

    That the weights are dense, on the CPU, of one dtype and side by side is for the caller to know.
    """
    if type(x) not in _PLAIN or not x.is_cpu or x.dim() == 0 or not recording(x, *weights):
        return False
    if x.numel() < LEAST_ROWS * x.shape[-1] or x.shape[-1] != weights[0].shape[1] or not as_given(elementwise=True):
        return False
    elements = sum(one.numel() for one in weights)
    if torch.is_autocast_enabled("cpu"):
        floating = x.dtype in _FLOATS and weights[0].dtype in _FLOATS
        return floating and torch.get_autocast_dtype("cpu") is torch.bfloat16 and elements >= SMALLEST_WEIGHT
    return x.dtype is weights[0].dtype is torch.float32 and _prefers_onednn(elements)


def linear(x: Tensor, joint: Tensor, bias: Tensor | None, parameters: Sequence[Tensor]) -> Tensor:
    """x (..., K), joint (N, K), bias (N,) -> (..., N), differentiable any number of times, for a call that `prefers`
    takes; in the dtype of autocast where it is enabled.

    parameters: the weights that joint is made of, one after the other, and with a bias the biases, of all of which the
    gradients are computed.
    """
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    output: Tensor = _Linear.apply(x.to(dtype), joint.detach(), None if bias is None else bias.detach(), *parameters)
    return output


def product(a: Tensor, b: Tensor) -> Tensor:
    """a (M, K) @ b.T, b (N, K), in their one dtype, without gradients."""
    if a.dtype is torch.float32 and _prefers_onednn(b.numel()) and a.numel() and b.numel():
        found: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
        return found
    return a @ b.t()


def _prefers_onednn(elements: int) -> bool:
    return _ONEDNN and elements >= ONEDNN_WEIGHT and bool(torch.backends.mkldnn.enabled)


class _Linear(torch.autograd.Function):
    """Gradients of every order, after the first the definition's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, joint: Tensor, bias: Tensor | None, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x, joint, *parameters)
        ctx.biased = bias is not None
        with torch.autocast("cpu", enabled=False):
            output = product(x.reshape(-1, x.shape[-1]), joint.to(x.dtype))
            if bias is not None:
                output += bias.to(x.dtype)
        return output.view(*x.shape[:-1], joint.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, joint, *parameters = ctx.saved_tensors
        weights = parameters[: len(parameters) // 2] if ctx.biased else parameters
        needed = (ctx.needs_input_grad[0], *ctx.needs_input_grad[3:])
        if torch.is_grad_enabled() or transforming():
            found = by_definition(_definition(len(weights)), (x, *parameters), needed, grad)
            return found[0], None, None, *found[1:]
        rows, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, joint.shape[0])
        grads: list[Tensor | None] = [None] * len(needed)
        if needed[0]:
            grads[0] = product(grad, joint.to(x.dtype).t()).view(x.shape)
        sizes = [len(one) for one in weights]
        if any(needed[1 : 1 + len(weights)]):
            grads[1 : 1 + len(weights)] = (grad.t() @ rows).to(joint.dtype).split(sizes)
        if ctx.biased:
            grads[1 + len(weights) :] = grad.sum(0, dtype=joint.dtype).split(sizes)
        own = [found if need else None for found, need in zip(grads, needed, strict=True)]
        return own[0], None, None, *own[1:]


def _definition(weights: int) -> Callable[..., Tensor]:
    def definition(x: Tensor, *parameters: Tensor) -> Tensor:
        joint, biases = torch.cat(parameters[:weights]).to(x.dtype), parameters[weights:]
        return F.linear(x, joint, torch.cat(biases).to(x.dtype) if biases else None)

    return definition
