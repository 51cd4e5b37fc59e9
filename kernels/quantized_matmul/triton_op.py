"""quantized_matmul in Triton, forward and gradient of x, for CUDA and ROCm; native.py defines it.

Nothing here imports Triton until a kernel is launched; with TRITON_INTERPRET=1 set before that they run on the CPU.
"""

from __future__ import annotations

import functools

import torch

from easytorch.kernels.interop.triton_devices import TOO_OLD, architecture_of, processors, refusal
from easytorch.kernels.quantized_matmul import operators
from easytorch.kernels.quantized_matmul.formats import LEVELS, NF4_LEVELS
from easytorch.kernels.quantized_matmul.native import check_arguments
from easytorch.kernels.quantized_matmul.triton_tuning import splits_of, tiles_of
from easytorch.kernels.quantized_matmul.weight import QuantizedWeight


def supports(x: torch.Tensor, dtype: torch.dtype | None = None) -> str | None:
    """None when these kernels take x as `dtype` (None: its own), else the reason."""
    return refusal(x.device, dtype or x.dtype)


def quantized_matmul(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (..., K), weight (N, K), bias (N,) -> (..., N) in x's dtype; the weight is dequantized in registers.

    Raises `ValueError` for shapes that do not fit and for what `supports` refuses.
    """
    check_arguments(x, weight, bias)
    reason = supports(x)
    if reason is not None:
        raise ValueError(f"triton quantized_matmul: {reason}")
    return _run(x, weight, bias)


def _forward(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    from easytorch.kernels.quantized_matmul.triton_calls import forward_call

    rows, outputs = x.shape[0], weight.shape[0]
    tiles = tiles_of("forward", _architecture(x), x.dtype, rows, weight.group_size)
    splits = splits_of(tiles, rows, *weight.shape, processors(x.device))
    partial = x.new_empty(splits, rows, outputs, dtype=x.dtype if splits == 1 else torch.float32)
    added = None if bias is None or splits > 1 else bias.contiguous()
    forward_call(tiles, _adjacent(x), _contiguous(weight), _levels(weight.format, x.device), added, partial).launch()
    if splits == 1:
        return partial[0]
    total = partial.sum(0)
    return (total if bias is None else total.add_(bias)).to(x.dtype)


def _input_grad(grad: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    from easytorch.kernels.quantized_matmul.triton_calls import input_grad_call

    output = grad.new_empty(grad.shape[0], weight.shape[1])
    tiles = tiles_of("input_grad", _architecture(grad), grad.dtype, grad.shape[0], weight.group_size)
    input_grad_call(tiles, _adjacent(grad), _contiguous(weight), _levels(weight.format, grad.device), output).launch()
    return output


def _adjacent(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _contiguous(weight: QuantizedWeight) -> QuantizedWeight:
    weight = weight.separated()
    zero = None if weight.zero is None else weight.zero.contiguous()
    tensors = (weight.data.contiguous(), weight.scale.contiguous(), zero)
    return QuantizedWeight(*tensors, weight.format, weight.shape, weight.group_size)


@functools.cache
def _levels(format: str, device: torch.device) -> torch.Tensor:
    return torch.tensor(LEVELS.get(format, NF4_LEVELS), device=device)  # those that no format looks up are not read


def _architecture(tensor: torch.Tensor) -> str:
    architecture = architecture_of(tensor.device)
    if architecture is None:
        raise ValueError(f"triton quantized_matmul: {TOO_OLD}")
    return architecture


_run = operators.define("triton", _forward, _input_grad)
