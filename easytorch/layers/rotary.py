"""Rotary positions: the table of angles a model shares, and its application through the `rotary` operation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from easytorch.kernels.rotary.frequencies import Frequencies, cos_sin, inverse_frequencies
from easytorch.operations import OperationRegistry

_OPERATION = OperationRegistry.create("rotary")


class RotaryEmbedding(nn.Module):
    """cos and sin of every position, for each rope type of transformers (linear, dynamic, yarn, longrope, llama3, ...).

    The frequencies that depend on the length (dynamic, longrope) are those of the largest position of the call. The
    buffer names are those transformers' initialization after a meta-device load looks for.
    """

    inv_freq: torch.Tensor
    original_inv_freq: torch.Tensor

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.config = config
        self.rope_type: str = config.rope_parameters["rope_type"]
        inv_freq, self.attention_scaling = _frequencies(config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(
        config: PreTrainedConfig, device: torch.device | None = None, **_: object
    ) -> tuple[torch.Tensor, float]:
        """The frequencies of the "default" type, and 1.0: what transformers asks of a model for that type."""
        return _frequencies(config, device=device)

    @torch.no_grad()
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """position_ids (B, T) -> cos, sin (B, T, R) in the dtype of `x`; the angles are float32 throughout.

        With `mrope_section` among the rope parameters position_ids may be (3, B, T): time, height and width.
        """
        frequencies = Frequencies(self.inv_freq.to(x.device), self.attention_scaling)
        if self.rope_type in ("dynamic", "longrope"):
            frequencies = _frequencies(self.config, device=x.device, seq_len=position_ids.max() + 1)
        rope = self.config.rope_parameters
        section = rope.get("mrope_section") if position_ids.dim() == 3 else None
        interleaved = bool(rope.get("mrope_interleaved"))
        return cos_sin(position_ids, frequencies, x.dtype, mrope_section=section, mrope_interleaved=interleaved)


def _frequencies(config: PreTrainedConfig, **how: Any) -> Frequencies:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return inverse_frequencies(
        config.rope_parameters, head_dim=head_dim, max_position_embeddings=config.max_position_embeddings, **how
    )


def apply_rotary(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T, H, D), (B, T, K, D), cos and sin (B, T, R) -> query and key turned by their positions."""
    return _OPERATION(query, key, cos, sin, interleaved=interleaved)
