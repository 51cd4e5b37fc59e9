"""The scan of Mamba-2 by the operator in C++ (cpu*.cpp here): chunks are matrix products in the caches, and a single
token is one pass over the state; its gradient computes the states before the chunks again."""

from __future__ import annotations

import torch
from torch import Tensor

from easytorch.kernels.cpu import library
from easytorch.kernels.cpu.recurrences import refusal_of_sequences, state_space_tensors
from easytorch.kernels.interop.torch_func import recording
from easytorch.kernels.ssm2 import cpu_gradient
from easytorch.kernels.ssm2.native import NO_LIMIT, check_arguments


def supports(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,
             dt_bias: Tensor | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = NO_LIMIT,
             initial_state: Tensor | None = None, segment_ids: Tensor | None = None) -> str | None:  # fmt: skip
    """None when `ssm2` takes this call, else the reason. The first call may build the library."""
    given = (x, dt, A, B, C, D, z, dt_bias, initial_state)
    return refusal_of_sequences(given, segment_ids, (x, B), gradients=True)


def ssm2(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
    initial_state: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`native.ssm2` in C++: the same shapes, dtypes and errors.

    Raises `NotImplementedError` with the reason where `supports` gives one.
    """
    check_arguments(x, dt, A, B, C, D, z, dt_bias, dt_limit, initial_state, segment_ids)
    given = (x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, initial_state, segment_ids)
    if (reason := supports(*given)) is not None:
        raise NotImplementedError(f"ssm2: {reason}")
    return run(*given, library.BEST)


def run(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None,
    dt_softplus: bool, dt_limit: tuple[float, float], initial_state: Tensor | None, segment_ids: Tensor | None,
    level: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`ssm2` without its checks."""
    if recording(x, dt, A, B, C, D, z, dt_bias, initial_state):
        return cpu_gradient.ssm2(
            x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, initial_state, segment_ids, level
        )
    outputs: tuple[Tensor, Tensor] = torch.ops.easytorch_cpu.ssm2.default(
        *state_space_tensors(x, dt, A, B, C, D, z, dt_bias, initial_state, segment_ids),
        dt_softplus,
        float(dt_limit[0]),
        float(dt_limit[1]),
        level,
    )
    return outputs
