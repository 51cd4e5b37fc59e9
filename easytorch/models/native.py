"""`NativeModel`: what every native family shares with transformers' own classes, and where it differs."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from easytorch.layers.attention import NATIVE_INTERFACES
from easytorch.protocol.bridge import BridgeMixin


class NativeModel(BridgeMixin, PreTrainedModel):
    """A `transformers.PreTrainedModel` whose attention is ours under every name, "sdpa" and "eager" included."""

    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    @classmethod
    def is_custom_code(cls) -> bool:
        """False: these are transformers' weights under transformers' names, so its conversions of old names apply."""
        return cls.is_remote_code()

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True

    def _check_and_adjust_attn_implementation(
        self, attn_implementation: str | None, is_init_check: bool = False, allow_all_kernels: bool = False
    ) -> str:
        """ "easytorch" unless one is asked for; "flash" is ours, without transformers' search for flash-attn."""
        if attn_implementation is None:
            return "easytorch"
        if attn_implementation in NATIVE_INTERFACES:
            return attn_implementation
        if "flash" in attn_implementation or attn_implementation == "flex_attention":
            raise ValueError(
                f"{type(self).__name__} does not run attn_implementation={attn_implementation!r}; it takes "
                f"{', '.join(map(repr, NATIVE_INTERFACES))} or a name registered with transformers.AttentionInterface"
            )
        return super()._check_and_adjust_attn_implementation(attn_implementation, is_init_check, allow_all_kernels)


def keep_logits(hidden_states: torch.Tensor, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
    """The positions of hidden_states (B, T, D) whose logits are wanted.

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
    """`config.hidden_act`: a name transformers knows, or the function itself."""
    from transformers.activations import ACT2FN

    return ACT2FN[name_or_function] if isinstance(name_or_function, str) else name_or_function
