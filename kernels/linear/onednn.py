"""float32 `linear` by oneDNN, forward and backward, on plain weights: nothing is repacked or cached.

torch's own F.linear multiplies float32 matrices with MKL, which on AMD's CPUs does not take its fastest path. The way
into oneDNN is the operator that inductor emits for fused linear layers, `mkldnn::_linear_pointwise`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from easytorch.kernels.interop.torch_func import recording, transforming
from easytorch.kernels.linear.native import check_tensors
from easytorch.kernels.linear.operator import define


def supports(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> str | None:
    """None when `linear` takes this call, else the reason."""
    for tensor in (x, weight, bias):
        if tensor is None:
            continue
        if tensor.dtype != torch.float32:
            return f"it takes float32 only, got {tensor.dtype}"
        if tensor.layout != torch.strided or (type(tensor) not in _PLAIN and not torch.compiler.is_compiling()):
            return f"it takes plain dense tensors, got {type(tensor).__name__} ({tensor.layout})"
    if not _BUILT:
        return "this torch was built without oneDNN"
    if torch.compiler.is_exporting():
        return "an exported program should need nothing but ATen where it runs"
    if torch.is_autocast_enabled("cpu"):
        return "autocast would change the dtype"
    if transforming():
        return "it does not run under torch.func's transforms"
    if torch.compiler.is_compiling():  # the checks below cannot be traced
        return None
    if torch.jit.is_tracing():
        return "a traced program should need nothing but ATen where it runs"
    if not torch.backends.mkldnn.enabled:
        return "torch.backends.mkldnn.enabled is off"
    return None


_BUILT = torch.backends.mkldnn.is_available()
_PLAIN = (Tensor, torch.nn.Parameter)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(..., K), weight (N, K), bias (N,) -> (..., N), all float32; differentiable any number of times.

    Raises `NotImplementedError` with the reason where `supports` gives one.
    """
    check_tensors(x, weight, bias)
    if (reason := supports(x, weight, bias)) is not None:
        raise NotImplementedError(reason)
    if not recording(x, weight, bias) and not torch.compiler.is_compiling():
        return _run(x, weight, bias)  # without the custom operator, which costs 10 us
    rows = _linear(x.flatten(0, -2) if x.dim() > 1 else x[None], weight, bias)
    return rows.reshape(*x.shape[:-1], weight.shape[0])


def _run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.numel() == 0 or weight.numel() == 0:  # for K = 0 oneDNN returns uninitialized memory
        return F.linear(x, weight, bias)
    if bias is not None:
        bias = bias.contiguous()  # oneDNN reads N consecutive numbers, whatever the stride
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


_linear = define("onednn_linear", _run)
