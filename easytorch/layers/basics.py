"""Shared steps of models: input checks, activations, and selecting the positions whose logits are computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN


def keep_logits(hidden_states: torch.Tensor, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
    """The positions of hidden_states (B, T, D) whose logits are computed.

    int k: the last k, all for 0. A 1D tensor: those positions of every row. A 2D integer tensor (B, N): those of each
    row. A 2D boolean tensor (B, T): the marked ones, flattened to (N, D).
    """
    if isinstance(logits_to_keep, int):
        return hidden_states[:, -logits_to_keep:] if logits_to_keep else hidden_states
    if logits_to_keep.ndim == 2 and logits_to_keep.dtype == torch.bool:
        return hidden_states[logits_to_keep]
    if logits_to_keep.ndim == 2:
        return torch.take_along_dim(hidden_states, logits_to_keep[..., None], dim=1)
    return hidden_states[:, logits_to_keep]


def check_one_input(input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> None:
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("You must specify exactly one of input_ids or inputs_embeds")


def activation(name_or_function: str | nn.Module) -> nn.Module:
    """`config.hidden_act`: a name transformers knows, or the function itself. `ValueError` for an unknown name."""
    if not isinstance(name_or_function, str):
        return name_or_function
    if name_or_function not in ACT2FN:
        raise ValueError(f"no activation is called {name_or_function!r}; known: {', '.join(sorted(ACT2FN))}")
    return ACT2FN[name_or_function]


def plain_activation(name_or_function: str | nn.Module) -> nn.Module:
    """The same for layers whose checkpoints have no place for weights of an activation, as "xielu" has them."""
    act = activation(name_or_function)
    if any(True for _ in act.parameters()):
        raise ValueError(f"the activation {name_or_function!r} has weights, for which these layers have no place")
    return act


def without_adapter(layer: nn.Module) -> Any:
    """The layer itself where PEFT has put an adapter around it, which has none of its sizes."""
    return layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer  # type: ignore[operator]
