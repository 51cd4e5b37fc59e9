"""F.linear of few rows by the C++ operator (cpu*.cpp): it reads the weight once, at memory bandwidth."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from easytorch.kernels.cpu import library
from easytorch.kernels.cpu.inference import ABSENT, DTYPES, other_dtype
from easytorch.kernels.interop.torch_func import as_given, eager, recording, transforming
from easytorch.kernels.linear.native import check_tensors
from easytorch.kernels.linear.operator import define
from easytorch.kernels.linear.preference import prefers_cpu

_PLAIN = (Tensor, torch.nn.Parameter)
_STRIDED = torch.strided


def supports(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> str | None:
    """None when `linear` takes this call, else the reason. The first call may build the library."""
    for tensor in (x, weight, bias):
        if tensor is None:
            continue
        if tensor.dtype not in DTYPES:
            return other_dtype(tensor.dtype)
        if tensor.layout != torch.strided or (type(tensor) not in _PLAIN and not torch.compiler.is_compiling()):
            return f"it takes plain dense tensors, got {type(tensor).__name__} ({tensor.layout})"
    if torch.is_autocast_enabled("cpu"):
        return "autocast would change the dtype"
    if transforming():
        return "it does not run under torch.func's transforms"
    return _missing()


def _missing() -> str | None:
    return library.missing()


# Marked as a constant for tracing, as torch.compiler.assume_constant_result does, which would import dynamo and Triton.
_missing._dynamo_marked_constant = True  # type: ignore[attr-defined]


def prefers(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """True where `run` is faster than ATen and oneDNN, and may be called right away.

    That is with plain tensors that fit, no gradient and no tracing. It may build the library.
    """
    return (
        prefers_cpu(x, weight)
        and x.dtype is weight.dtype
        and x.dtype in ABSENT
        and x.is_cpu
        and weight.is_cpu
        and weight.dim() == 2
        and x.dim() > 0
        and x.shape[-1] == weight.shape[1]
        and type(x) in _PLAIN
        and type(weight) in _PLAIN
        and x.layout is _STRIDED
        and weight.layout is _STRIDED
        and (bias is None or _adds(bias, weight))
        # `recording`, inlined: this runs for each product of each layer of each token
        and not (
            torch.is_grad_enabled()
            and (x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad))
        )
        and as_given()
        and library.missing() is None
    )


def _adds(bias: Tensor, weight: Tensor) -> bool:
    return (
        type(bias) in _PLAIN and bias.is_cpu and bias.dtype is weight.dtype and bias.shape == weight.shape[:1]
        and bias.layout is _STRIDED
    )  # fmt: skip


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(..., K), weight (N, K), bias (N,) -> (..., N) in one dtype; summed in float32, differentiable.

    Raises `NotImplementedError` with the reason where `supports` gives one.
    """
    check_tensors(x, weight, bias)
    if (reason := supports(x, weight, bias)) is not None:
        raise NotImplementedError(reason)
    if eager() and not recording(x, weight, bias) and torch._C._get_tracing_state() is None:
        return run(x, weight, bias)
    rows = _linear(x.flatten(0, -2) if x.dim() > 1 else x[None], weight, bias)
    return rows.reshape(*x.shape[:-1], weight.shape[0])


def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear` without checks and gradients: the tensors must have passed `native.check_tensors`."""
    if weight.stride(1) != 1 or (bias is not None and bias.stride(0) != 1):
        weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
    if 0 in weight.shape:
        return F.linear(x, weight, bias)
    return torch.ops.easytorch_cpu.linear.default(x, weight, ABSENT[x.dtype] if bias is None else bias, library.BEST)


def argmax(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The argmax over the last dimension of what `run` gives, without that: (..., K), weight (N, K) -> (...), int64.

    Of equal numbers the first, and NaN before all; for calls that `prefers` takes.
    """
    if weight.stride(1) != 1 or (bias is not None and bias.stride(0) != 1):
        weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
    none = ABSENT[x.dtype] if bias is None else bias
    return torch.ops.easytorch_cpu.linear_argmax.default(x, weight, none, library.BEST)


def _run_or_aten(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`run`, or ATen where the library is missing: an exported program may run on a machine without a compiler."""
    return run(x, weight, bias) if library.missing() is None else F.linear(x, weight, bias)


_linear = define("cpu_linear", _run_or_aten, F.linear)
