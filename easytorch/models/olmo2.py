"""OLMo 2 (arXiv:2501.00656): norms after attention and MLP, and of queries and keys across all heads."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import GenerationMixin, Olmo2Config

from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.heads import CausalLMHead, SequenceClassificationHead
from easytorch.layers.norm import Float32RMSNorm
from easytorch.layers.rotary import Float32RotaryEmbedding
from easytorch.models.mistral import MistralMLP
from easytorch.protocol.native import NativeDecoder


class Olmo2Attention(GroupedAttention):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.q_norm = Float32RMSNorm(self.num_heads * self.head_dim, config.rms_norm_eps)
        self.k_norm = Float32RMSNorm(self.num_key_value_heads * self.head_dim, config.rms_norm_eps)

    def rotate(self, query: torch.Tensor, key: torch.Tensor, *positions: Any) -> tuple[torch.Tensor, torch.Tensor]:
        query, key = self.q_norm(query.flatten(2)).view_as(query), self.k_norm(key.flatten(2)).view_as(key)
        return super().rotate(query, key, *positions)


class Olmo2DecoderLayer(DecoderLayer):
    """x + norm(attention(x)), then x + norm(mlp(x))."""

    attention_class: ClassVar[type[nn.Module]] = Olmo2Attention
    mlp_class = MistralMLP
    norm_class: ClassVar[type[nn.Module]] = Float32RMSNorm
    norms = ("post_attention_layernorm", "post_feedforward_layernorm")
    post_feedforward_layernorm: nn.Module

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        attended, _ = self.self_attn(hidden_states=hidden_states, **kwargs)
        hidden_states = hidden_states + self.post_attention_layernorm(attended)
        return hidden_states + self.post_feedforward_layernorm(self.mlp(hidden_states))


class Olmo2PreTrainedModel(NativeDecoder):
    config: Olmo2Config
    config_class = Olmo2Config
    _no_split_modules = ["Olmo2DecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": Olmo2DecoderLayer, "attentions": Olmo2Attention}  # noqa: RUF012


class Olmo2Model(DecoderBackbone, Olmo2PreTrainedModel):
    layer_class = Olmo2DecoderLayer
    rotary_class = Float32RotaryEmbedding


class Olmo2ForCausalLM(CausalLMHead, Olmo2PreTrainedModel, GenerationMixin):
    backbone_class = Olmo2Model


class Olmo2ForSequenceClassification(SequenceClassificationHead, Olmo2PreTrainedModel):
    backbone_class = Olmo2Model
