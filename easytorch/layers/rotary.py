"""Rotary positions: the table of angles a model shares, and its application through the `rotary` operation."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update

from easytorch.operations import OperationRegistry


class RotaryEmbedding(nn.Module):
    """cos and sin of every position, for each rope type of transformers (linear, dynamic, yarn, longrope, llama3, ...).

    The buffer names are those `dynamic_rope_update` and transformers' initialization after a meta-device load look for.
    """

    inv_freq: torch.Tensor
    original_inv_freq: torch.Tensor

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.config = config
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        self.rope_type: str = config.rope_parameters["rope_type"]
        init = ROPE_INIT_FUNCTIONS.get(self.rope_type, self.compute_default_rope_parameters)
        inv_freq, self.attention_scaling = init(config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(
        config: PreTrainedConfig, device: torch.device | None = None, **_: object
    ) -> tuple[torch.Tensor, float]:
        """theta ** (-2i / head_dim) for i below head_dim / 2 (arXiv:2104.09864), and 1.0: nothing is rescaled."""
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        exponents = torch.arange(0, dim, 2, dtype=torch.float, device=device) / dim
        return 1.0 / config.rope_parameters["rope_theta"] ** exponents, 1.0

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """position_ids (B, T) -> cos, sin (B, T, head_dim) in the dtype of `x`; the angles are float32 throughout."""
        angles = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float)
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self.attention_scaling).to(x.dtype), (angles.sin() * self.attention_scaling).to(x.dtype)


def apply_rotary(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T, H, D), (B, T, K, D), cos and sin (B, T, D) -> query and key turned by their positions."""
    return OperationRegistry.create("rotary")(query, key, cos, sin)
