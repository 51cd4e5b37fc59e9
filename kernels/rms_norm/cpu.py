"""RMS norm by the operator in C++ (cpu*.cpp here): one call, where ATen's takes eight in 16 bits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from easytorch.kernels.cpu import library, processor
from easytorch.kernels.cpu.inference import ABSENT, last_dim_contiguous, refusal_of_one_dtype, takes
from easytorch.kernels.cpu.norms import Norm
from easytorch.kernels.interop.torch_func import recording
from easytorch.kernels.rms_norm.native import check_tensors

# The shortest rows that it is chosen for: it adds squares in another order, and a small model keeps transformers' bits.
SMALLEST_ROW = 128


def supports(x: Tensor, weight: Tensor | None = None) -> str | None:
    """None when `rms_norm` takes this call, else the reason. The first call may build the library."""
    return refusal_of_one_dtype(*((x,) if weight is None else (x, weight)), gradients=True)


def prefers(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> bool:
    """True where `run` is faster than ATen and may be called right away: the tensors fit, and nothing is recorded. It
    may build the library."""
    return _fits(x, weight, eps) and takes(x, weight)


def prefers_recorded(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> bool:
    """The same of `rms_norm`, which autograd may record."""
    return _fits(x, weight, eps) and takes(x, weight, gradients=True)


def _fits(x: Tensor, weight: Tensor | None, eps: float) -> bool:
    shape = x.shape
    return (
        len(shape) > 0
        and shape[-1] >= SMALLEST_ROW
        and processor.AVX2  # where it was measured
        and (weight is None or weight.shape == shape[-1:])
        and type(eps) is float
        and 0.0 <= eps < math.inf
    )


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """(..., N), weight (N,) -> (..., N) in one dtype.

    Raises `NotImplementedError` with the reason where `supports` gives one.
    """
    check_tensors(x, weight, eps)
    if (reason := supports(x, weight)) is not None:
        raise NotImplementedError(reason)
    if recording(x, weight):
        output: Tensor = Norm.apply(x, weight, None, eps, False, library.BEST)
        return output
    return run(x, weight, eps, library.BEST)


def run(x: Tensor, weight: Tensor | None, eps: float, level: int) -> Tensor:
    """`rms_norm` without its checks, and without a gradient."""
    weight = ABSENT[x.dtype] if weight is None else last_dim_contiguous(weight)
    return torch.ops.easytorch_cpu.rms_norm.default(last_dim_contiguous(x), weight, eps, level)
