"""Causal convolution by the operator in C++ (cpu*.cpp here): taps and activation in one pass, and so
are the gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from easytorch.kernels.causal_conv1d import cpu_gradient
from easytorch.kernels.causal_conv1d.native import check_arguments
from easytorch.kernels.cpu import library
from easytorch.kernels.cpu.inference import last_dim_contiguous
from easytorch.kernels.cpu.recurrences import (
    contiguous_or_empty,
    refusal_of_sequences,
    segments_or_empty,
    state_or_empty,
)
from easytorch.kernels.interop.torch_func import recording


def supports(x: Tensor, weight: Tensor, bias: Tensor | None = None, initial_state: Tensor | None = None,
             activation: str | None = None, segment_ids: Tensor | None = None) -> str | None:  # fmt: skip
    """None when `causal_conv1d` takes this call, else the reason. The first call may build the library."""
    return refusal_of_sequences((x, weight, bias, initial_state), segment_ids, (x, weight), gradients=True)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    activation: str | None = None,
    segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`native.causal_conv1d` in C++: the same shapes, dtypes and errors.

    Raises `NotImplementedError` with the reason where `supports` gives one.
    """
    check_arguments(x, weight, bias, initial_state, activation, segment_ids)
    given = (x, weight, bias, initial_state, activation, segment_ids)
    if (reason := supports(*given)) is not None:
        raise NotImplementedError(f"causal_conv1d: {reason}")
    return run(*given, library.BEST)


def run(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None, activation: str | None,
    segment_ids: Tensor | None, level: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`causal_conv1d` without its checks."""
    if recording(x, weight, bias, initial_state):
        return cpu_gradient.causal_conv1d(x, weight, bias, initial_state, activation, segment_ids, level)
    outputs: tuple[Tensor, Tensor] = torch.ops.easytorch_cpu.causal_conv1d.default(
        last_dim_contiguous(x),
        weight,
        contiguous_or_empty(bias),
        state_or_empty(initial_state),
        segments_or_empty(segment_ids),
        activation is not None,
        level,
    )
    return outputs
