"""The gated delta rule by the operator in C++ (cpu*.cpp here): chunks are matrix products in the caches, and a
single token is two passes over the state. Gradients are token by token, of columns of the state that stay in the
caches."""

from __future__ import annotations

import torch
from torch import Tensor

from easytorch.kernels.cpu import library
from easytorch.kernels.cpu.inference import last_dim_contiguous
from easytorch.kernels.cpu.recurrences import refusal_of_sequences, segments_or_empty, state_or_empty
from easytorch.kernels.gated_delta_rule import cpu_gradient
from easytorch.kernels.gated_delta_rule.native import EPSILON, check_arguments
from easytorch.kernels.interop.torch_func import recording


def supports(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, softmax_scale: float | None = None,
             initial_state: Tensor | None = None, use_qk_l2norm: bool = False, segment_ids: Tensor | None = None,
             *, scale: float | None = None) -> str | None:  # fmt: skip
    """None when `gated_delta_rule` takes this call, else the reason. The first call may build the library."""
    if g.dim() == 4:
        return "it takes one decay a head, not one a channel"
    given = (query, key, value, g, beta, initial_state)
    return refusal_of_sequences(given, segment_ids, (query, value), gradients=True)


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    softmax_scale: float | None = None,
    initial_state: Tensor | None = None,
    use_qk_l2norm: bool = False,
    segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`native.gated_delta_rule` in C++: the same shapes, dtypes and errors.

    Raises `NotImplementedError` with the reason where `supports` gives one.
    """
    check_arguments(query, key, value, g, beta, initial_state, segment_ids)
    if (reason := supports(query, key, value, g, beta, None, initial_state, False, segment_ids)) is not None:
        raise NotImplementedError(f"gated_delta_rule: {reason}")
    return run(
        query, key, value, g, beta, softmax_scale, initial_state, use_qk_l2norm, segment_ids, library.BEST
    )  # fmt: skip


def run(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, softmax_scale: float | None,
    initial_state: Tensor | None, use_qk_l2norm: bool, segment_ids: Tensor | None, level: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`gated_delta_rule` without its checks."""
    if recording(query, key, value, g, beta, initial_state):
        return cpu_gradient.gated_delta_rule(
            query, key, value, g, beta, softmax_scale, initial_state, use_qk_l2norm, segment_ids, level
        )
    outputs: tuple[Tensor, Tensor] = torch.ops.easytorch_cpu.gated_delta_rule.default(
        last_dim_contiguous(query),
        last_dim_contiguous(key),
        last_dim_contiguous(value),
        last_dim_contiguous(g),
        last_dim_contiguous(beta),
        state_or_empty(initial_state),
        segments_or_empty(segment_ids),
        query.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale),
        use_qk_l2norm,
        EPSILON,
        level,
    )
    return outputs
