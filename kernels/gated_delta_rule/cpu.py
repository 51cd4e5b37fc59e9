"""The gated delta rule by the operator in C++ (cpu*.cpp here): chunks as products that stay in the caches, two
passes over the state for a single token. Inference only."""

from __future__ import annotations

import torch
from torch import Tensor

from easytorch.kernels.cpu import library
from easytorch.kernels.cpu.inference import side_by_side
from easytorch.kernels.cpu.recurrences import document_ids, refusal_of_sequences, state_of
from easytorch.kernels.gated_delta_rule.native import EPSILON, check_arguments


def supports(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, softmax_scale: float | None = None,
             initial_state: Tensor | None = None, use_qk_l2norm: bool = False, segment_ids: Tensor | None = None,
             *, scale: float | None = None) -> str | None:  # fmt: skip
    """None when `gated_delta_rule` takes this call, else the reason. The first call may build the library."""
    return refusal_of_sequences((query, key, value, g, beta, initial_state), segment_ids, (query, value))


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
    """What `native.gated_delta_rule` defines, with its shapes, dtypes and errors.

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
    outputs: tuple[Tensor, Tensor] = torch.ops.easytorch_cpu.gated_delta_rule.default(
        side_by_side(query),
        side_by_side(key),
        side_by_side(value),
        side_by_side(g),
        side_by_side(beta),
        state_of(initial_state),
        document_ids(segment_ids),
        query.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale),
        use_qk_l2norm,
        EPSILON,
        level,
    )
    return outputs
