"""Gated linear units by the operator in C++ (cpu*.cpp here): the activation and the product in one pass. Inference
only."""

from __future__ import annotations

import torch
from torch import Tensor

from easytorch.kernels.cpu import library, processor
from easytorch.kernels.cpu.inference import last_dim_contiguous, refusal_of_one_dtype, takes
from easytorch.kernels.glu.native import check_tensors

# The operator's numbers of the activations; gelu's by its `approximate`.
SILU = 0
GELU = {"none": 1, "tanh": 2}
# The shortest rows that it is chosen for: its exponential rounds otherwise, and a small model keeps transformers' bits.
SMALLEST_ROW = 256


def supports(gate: Tensor, up: Tensor) -> str | None:
    """None when `swiglu` and `geglu` take this call, else the reason. The first call may build the library."""
    return refusal_of_one_dtype(gate, up)


def prefers(gate: Tensor, up: Tensor) -> bool:
    """True where `run` is faster than ATen and may be called right away: the tensors fit. It may build the library."""
    shape = gate.shape
    return (
        len(shape) > 0
        and shape[-1] >= SMALLEST_ROW
        and processor.BFLOAT16_DOT_PRODUCTS  # where it was measured
        and up.shape == shape
        and takes(gate, up)
    )


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """(..., N), (..., N) -> (..., N): silu(gate) * up.

    Raises `NotImplementedError` with the reason where `supports` gives one.
    """
    check_tensors("swiglu", gate, up)
    return _checked(gate, up, SILU)


def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """(..., N), (..., N) -> (..., N): gelu(gate) * up, as `swiglu`."""
    check_tensors("geglu", gate, up, approximate)
    return _checked(gate, up, GELU[approximate])


def _checked(gate: Tensor, up: Tensor, activation: int) -> Tensor:
    if (reason := supports(gate, up)) is not None:
        raise NotImplementedError(reason)
    return run(gate, up, activation, library.BEST)


def run(gate: Tensor, up: Tensor, activation: int, level: int) -> Tensor:
    """The unit without its checks."""
    return torch.ops.easytorch_cpu.glu.default(last_dim_contiguous(gate), last_dim_contiguous(up), activation, level)
