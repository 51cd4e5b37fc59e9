"""Gated linear units by the operator in C++ (cpu*.cpp here): the activation and the product in one pass, and so
are both gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.cpu import library, processor
from easytorch.kernels.cpu.inference import last_dim_contiguous, refusal_of_one_dtype, takes
from easytorch.kernels.glu import native
from easytorch.kernels.glu.native import check_tensors
from easytorch.kernels.interop.definition_gradients import by_definition
from easytorch.kernels.interop.torch_func import recording, transforming

# The operator's numbers of the activations; gelu's by its `approximate`.
SILU = 0
GELU = {"none": 1, "tanh": 2}
# The shortest rows that it is chosen for: its exponential rounds otherwise, and a small model keeps transformers' bits.
SMALLEST_ROW = 256
# The fewest numbers that it is chosen for in training. Forward and backward over ATen's, 512 rows of 4096, one thread
# of a busy EPYC (Zen 4): silu 0.52 in float32, 0.92 in bfloat16, 0.75 in float16; gelu 0.52, 1.33 and 0.80; by tanh
# 0.28, 0.46 and 0.36. With 2**14 numbers up to 1.3: the autograd.Function takes 20 us.
SMALLEST_IN_TRAINING = 2**17


def supports(gate: Tensor, up: Tensor) -> str | None:
    """None when `swiglu` and `geglu` take this call, else the reason. The first call may build the library."""
    return refusal_of_one_dtype(gate, up, gradients=True)


def _gains_by_avx2(dtype: torch.dtype, activation: int) -> bool:
    """Whether it is faster than ATen with AVX2 alone: of 512 x 4096, silu 0.51 in float32, 1.13 in bfloat16 and 0.83 in
    float16, gelu 0.71, 1.29 and 1.04, by tanh 0.23, 0.45 and 0.31."""
    return dtype is torch.float32 or activation == GELU["tanh"]


def prefers(gate: Tensor, up: Tensor, activation: int = SILU) -> bool:
    """True where `run` is faster than ATen and may be called right away: the tensors fit. It may build the library."""
    shape = gate.shape
    if (
        len(shape) == 0
        or shape[-1] < SMALLEST_ROW
        or not processor.AVX2  # where it was measured
        or not (processor.AVX512 or _gains_by_avx2(gate.dtype, activation))
        or up.shape != shape
        or not takes(gate, up, gradients=True)
    ):
        return False
    if not recording(gate, up):
        return True
    return gate.numel() >= SMALLEST_IN_TRAINING and (activation != GELU["none"] or gate.dtype is not torch.bfloat16)


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
    if recording(gate, up):
        recorded: Tensor = _Unit.apply(gate, up, activation, level)
        return recorded
    return torch.ops.easytorch_cpu.glu.default(last_dim_contiguous(gate), last_dim_contiguous(up), activation, level)


class _Unit(torch.autograd.Function):
    """The unit under autograd, which keeps gate and up alone; gradients of every order, after the first the
    definition's."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: int, level: int) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation, ctx.level = activation, level
        output: Tensor = torch.ops.easytorch_cpu.glu.default(
            last_dim_contiguous(gate), last_dim_contiguous(up), activation, level
        )
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        needed = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled() or transforming():
            return *by_definition(_definition(ctx.activation), (gate, up), needed, grad), None, None
        grads = torch.ops.easytorch_cpu.glu_backward.default(
            last_dim_contiguous(grad), last_dim_contiguous(gate), last_dim_contiguous(up), ctx.activation, ctx.level
        )
        return *(found if need else None for found, need in zip(grads, needed, strict=True)), None, None


def _definition(activation: int) -> Callable[..., Tensor]:
    if activation == SILU:
        return native.swiglu
    return functools.partial(native.geglu, approximate="tanh" if activation == GELU["tanh"] else "none")
