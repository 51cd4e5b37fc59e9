"""jax_chunks.py inside a torch_xla graph: one node forward, one backward."""

from __future__ import annotations

import torch

from easytorch.kernels.gated_delta_rule import aten, jax_chunks
from easytorch.kernels.gated_delta_rule.native import check_arguments, first_state, prepare
from easytorch.kernels.interop.xla_bridge import call_jax_with_gradient
from easytorch.kernels.recurrence import documents


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    softmax_scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    use_qk_l2norm: bool = False,
    segment_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`native.gated_delta_rule` on the xla device, for any dtype but float64."""
    sizes = check_arguments(query, key, value, g, beta, initial_state, segment_ids)
    if sizes.length == 1:
        return aten.gated_delta_rule(
            query, key, value, g, beta, softmax_scale, initial_state, use_qk_l2norm, segment_ids
        )
    query, key = prepare(query, key, sizes, softmax_scale, use_qk_l2norm, torch.float32)
    number = None if segment_ids is None else documents.numbers(segment_ids).to(torch.int32)
    state = first_state(value, sizes, initial_state)
    outputs, last = call_jax_with_gradient(
        jax_chunks.gated_delta_rule, jax_chunks.gated_delta_rule_backward, query, key, value,
        g.float(), beta.float(), state, number, outputs=2,
        precision="highest" if value.dtype == torch.float32 else "high",
    )  # fmt: skip
    return outputs, last
