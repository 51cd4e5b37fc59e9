"""Layer norm by ATen whose gradient is the operator in C++ (cpu*.cpp here), which sums those of weight and bias in
float32."""

from __future__ import annotations

from torch import Tensor, float32

from easytorch.kernels.cpu import library, processor
from easytorch.kernels.cpu.inference import DTYPES, other_dtype, refusal
from easytorch.kernels.cpu.norms import Norm
from easytorch.kernels.interop.torch_func import recording
from easytorch.kernels.layer_norm.aten import FEW_ROWS
from easytorch.kernels.layer_norm.native import check_tensors


def supports(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> str | None:
    """None when `layer_norm` takes this call, else the reason. The first call may build the library."""
    given = [tensor for tensor in (x, weight, bias) if tensor is not None]
    for tensor in given:
        if tensor.dtype not in DTYPES:
            return other_dtype(tensor.dtype)
    if any(tensor.dtype not in (x.dtype, float32) or tensor.dtype is not given[1].dtype for tensor in given[1:]):
        return "weight and bias have x's dtype, or both float32"
    return refusal(given, gradients=True)


def prefers(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> bool:
    """True where it is faster than ATen and takes the call: training in 16 bits. It may build the library."""
    return (
        processor.AVX2  # where it was measured
        and x.dtype is not float32
        and recording(weight, bias)
        and x.dim() > 0
        and x.numel() > FEW_ROWS * x.shape[-1]
        and x.is_cpu
        and supports(x, weight, bias) is None
    )


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """`native.layer_norm` by ATen, its gradient in C++: the same shapes, dtypes and errors.

    Raises `NotImplementedError` with the reason where `supports` gives one.
    """
    check_tensors(x, weight, bias, eps)
    if (reason := supports(x, weight, bias)) is not None:
        raise NotImplementedError(reason)
    return run(x, weight, bias, eps, library.BEST)


def run(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, level: int) -> Tensor:
    """`layer_norm` without its checks."""
    output: Tensor = Norm.apply(x, weight, bias, eps, True, level)
    return output
