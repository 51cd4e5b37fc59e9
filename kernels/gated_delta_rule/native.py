"""The gated delta rule: https://arxiv.org/abs/2412.06464, equation 10."""

from __future__ import annotations

from typing import NamedTuple

import torch

from easytorch.kernels.interop.arguments import check_tensors
from easytorch.kernels.recurrence import documents
from easytorch.kernels.recurrence.arguments import check_segments, check_sequence, check_shapes, wide_dtype

EPSILON = 1e-6  # of the normalization of queries and keys, as in flash-linear-attention and transformers


class DeltaRuleDims(NamedTuple):
    """The dimensions B, T, H, Dk, Hv and Dv of a call."""

    batch: int
    length: int
    heads: int
    key_width: int
    value_heads: int
    value_width: int


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
    """query, key (B, T, H, Dk), value (B, T, Hv, Dv), g (B, T, Hv) or (B, T, Hv, Dk), beta (B, T, Hv), initial_state
    (B, Hv, Dk, Dv) -> outputs (B, T, Hv, Dv), final_state (B, Hv, Dk, Dv). Hv is a multiple of H: Hv / H value heads
    share a query and a key.

    Token by token, with key and query divided by sqrt(their squared norm + 1e-6) where use_qk_l2norm:
        state = exp(g) * state;  state += beta * key (value - state^T key)^T;  output = softmax_scale * state^T query.
    softmax_scale: None means Dk ** -0.5. g: logarithm of the decay, at most 0; with Dk numbers a head each row of the
    state has its own (Kimi Delta Attention, https://arxiv.org/abs/2510.26692, equation 1). The first state is
    initial_state, zeros where it is None; segment_ids (B, T), integers: it is zeros again wherever a token's id is not
    that of the token before it.

    Computed in float32 (float64 for a float64 value), the dtype of final_state; outputs are rounded once, to value's.
    """
    sizes = check_arguments(query, key, value, g, beta, initial_state, segment_ids)
    query, key = prepare(query, key, sizes, softmax_scale, use_qk_l2norm, wide_dtype(value))
    shared = sizes.value_heads // sizes.heads
    query, key = (tensor.repeat_interleave(shared, 2).unsqueeze(4) for tensor in (query, key))  # (B, T, Hv, Dk, 1)
    wide = wide_dtype(value)
    decay, rate, values = g.to(wide).exp(), beta.to(wide).unsqueeze(3), value.to(wide)
    if g.dim() == 3:
        decay = decay.unsqueeze(3)
    if segment_ids is not None:
        decay = decay.masked_fill(documents.first_tokens(segment_ids)[:, :, None, None], 0.0)
    state = first_state(value, sizes, initial_state)
    outputs = []
    for t in range(sizes.length):
        state = decay[:, t].unsqueeze(3) * state
        change = rate[:, t] * (values[:, t] - (state * key[:, t]).sum(2))
        state = state + key[:, t] * change.unsqueeze(2)
        outputs.append((state * query[:, t]).sum(2))
    return torch.stack(outputs, 1).to(value.dtype), state


def prepare(
    query: torch.Tensor, key: torch.Tensor, sizes: DeltaRuleDims, softmax_scale: float | None, use_qk_l2norm: bool,
    wide: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Query and key in the dtype `wide`, normalized where asked for, the query scaled."""
    query, key = query.to(wide), key.to(wide)
    if use_qk_l2norm:
        query, key = normalized(query, key)
    return query * (sizes.key_width**-0.5 if softmax_scale is None else softmax_scale), key


def normalized(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each divided by sqrt(its squared norm + EPSILON)."""
    query, key = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + EPSILON) for t in (query, key))
    return query, key


def first_state(value: torch.Tensor, sizes: DeltaRuleDims, initial_state: torch.Tensor | None) -> torch.Tensor:
    """(B, Hv, Dk, Dv) in the wide dtype."""
    if initial_state is not None:
        return initial_state.to(wide_dtype(value))
    shape = (sizes.batch, sizes.value_heads, sizes.key_width, sizes.value_width)
    return torch.zeros(shape, dtype=wide_dtype(value), device=value.device)


def check_arguments(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    initial_state: torch.Tensor | None, segment_ids: torch.Tensor | None,
) -> DeltaRuleDims:  # fmt: skip
    """The dimensions of a call; an error for tensors that do not fit the definition."""
    check_tensors(
        "gated_delta_rule", value=value, query=query, key=key, g=g, beta=beta, initial_state=initial_state,
        segment_ids=segment_ids,
    )  # fmt: skip
    check_sequence("gated_delta_rule", "query", query, "B, T, H, Dk")
    check_sequence("gated_delta_rule", "value", value, "B, T, Hv, Dv")
    batch, length, heads, key_width = query.shape
    value_heads, value_width = value.shape[2:]
    if key_width == 0:
        raise ValueError(f"gated_delta_rule: query and key must have a width of at least 1, got {tuple(query.shape)}")
    if heads == 0 or value_heads % heads:
        raise ValueError(f"gated_delta_rule: value heads must be a multiple of {heads} heads, got {value_heads}")
    scalars = (batch, length, value_heads)
    check_shapes(
        "gated_delta_rule", key=(key, tuple(query.shape)), value=(value, (*scalars, value_width)),
        g=(g, scalars if g.dim() != 4 else (*scalars, key_width)), beta=(beta, scalars),
        initial_state=(initial_state, (batch, value_heads, key_width, value_width)),
    )  # fmt: skip
    check_segments("gated_delta_rule", segment_ids, (batch, length))
    return DeltaRuleDims(batch, length, heads, key_width, value_heads, value_width)
