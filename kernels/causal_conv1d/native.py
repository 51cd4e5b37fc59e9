"""Causal depthwise convolution, as in front of Mamba's scan: https://arxiv.org/abs/2312.00752, section 3.4."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from easytorch.kernels.interop.arguments import check_tensors
from easytorch.kernels.recurrence import documents
from easytorch.kernels.recurrence.arguments import check_segments, check_sequence, check_shapes, wide_dtype

ACTIVATIONS = (None, "silu", "swish")


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    activation: str | None = None,
    segment_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x (B, T, C), weight (C, W), bias (C,), initial_state (B, C, W-1) -> outputs (B, T, C), final_state (B, C, W-1).

    outputs[t] = activation(bias + sum over w of weight[:, w] * x[t - (W-1) + w]), where the W-1 tokens before the first
    are those of initial_state, oldest first, zeros where it is None; activation: None, "silu", or "swish", its other
    name. final_state is the last W-1 tokens. segment_ids (B, T), integers: a token reads none of another document's,
    initial_state belongs to the first token's, and final_state is zero where it would hold another than the last's.

    Computed in float32 (float64 for float64), the dtype of final_state; outputs are rounded once, to x's dtype.
    """
    check_arguments(x, weight, bias, initial_state, activation, segment_ids)
    wide, (length, width) = wide_dtype(x), (x.shape[1], weight.shape[1])
    extended = with_past(x, initial_state, width)
    outputs = torch.zeros(x.shape, dtype=wide, device=x.device)
    if bias is not None:
        outputs = outputs + bias.to(wide)
    number = None if segment_ids is None else document_of(segment_ids, width)
    for tap in range(width):
        tokens = extended[:, tap : tap + length]
        if number is not None:
            tokens = tokens * (number[:, tap : tap + length] == number[:, width - 1 :]).unsqueeze(2)
        outputs = outputs + tokens * weight[:, tap].to(wide)
    if activation is not None:
        outputs = F.silu(outputs)
    return outputs.to(x.dtype), last_tokens(extended[:, length:], number)


def with_past(x: torch.Tensor, initial_state: torch.Tensor | None, width: int) -> torch.Tensor:
    """x in the wide dtype with the width - 1 tokens before it: (B, W-1+T, C)."""
    wide = x.to(wide_dtype(x))
    if initial_state is None:
        return F.pad(wide, (0, 0, width - 1, 0))
    return torch.cat([initial_state.to(wide.dtype).transpose(1, 2), wide], 1)


def document_of(segment_ids: torch.Tensor, width: int) -> torch.Tensor:
    """The number of the document of each token of `with_past`: (B, W-1+T)."""
    return F.pad(documents.numbers(segment_ids), (width - 1, 0))


def last_tokens(past: torch.Tensor, number: torch.Tensor | None) -> torch.Tensor:
    """The last W-1 tokens (B, W-1, C) as a state (B, C, W-1), zeros where of another document than the last."""
    if number is not None and past.shape[1] > 0:
        past = past * (number[:, -past.shape[1] :] == number[:, -1:]).unsqueeze(2)
    return past.transpose(1, 2).contiguous()


def check_arguments(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, initial_state: torch.Tensor | None,
    activation: str | None, segment_ids: torch.Tensor | None,
) -> None:  # fmt: skip
    """An error for tensors that do not fit the definition, and for an unknown activation."""
    check_tensors("causal_conv1d", x=x, weight=weight, bias=bias, initial_state=initial_state, segment_ids=segment_ids)
    check_sequence("causal_conv1d", "x", x, "B, T, C")
    batch, length, channels = x.shape
    if weight.dim() != 2 or weight.shape[0] != channels or weight.shape[1] == 0:
        raise ValueError(f"causal_conv1d: weight must be ({channels}, W), got {tuple(weight.shape)}")
    state = (batch, channels, weight.shape[1] - 1)
    check_shapes(
        "causal_conv1d", weight=(weight, tuple(weight.shape)), bias=(bias, (channels,)),
        initial_state=(initial_state, state),
    )  # fmt: skip
    check_segments("causal_conv1d", segment_ids, (batch, length))
    if activation not in ACTIVATIONS:
        raise ValueError(f"causal_conv1d: activation must be None, 'silu' or 'swish', got {activation!r}")
