"""GLM 4 (0414): GLM's decoder with a norm before and after each part."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, Glm4Config

from easytorch.layers.decoder import DecoderBackbone
from easytorch.layers.heads import CausalLMHead, SequenceClassificationHead, TokenClassificationHead
from easytorch.layers.rotary import PartialRotaryEmbedding
from easytorch.models.glm import GlmAttention, GlmDecoderLayer
from easytorch.protocol.native import NativeDecoder


class Glm4Attention(GlmAttention):
    pass


class Glm4DecoderLayer(GlmDecoderLayer):
    attention_class = Glm4Attention
    norms = ("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm")
    post_self_attn_layernorm: nn.Module
    post_mlp_layernorm: nn.Module

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + self.post_self_attn_layernorm(attended)
        return hidden_states + self.post_mlp_layernorm(self.mlp(self.post_attention_layernorm(hidden_states)))


class Glm4PreTrainedModel(NativeDecoder):
    config: Glm4Config
    config_class = Glm4Config
    _no_split_modules = ["Glm4DecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": Glm4DecoderLayer, "attentions": Glm4Attention}  # noqa: RUF012


class Glm4Model(DecoderBackbone, Glm4PreTrainedModel):
    layer_class = Glm4DecoderLayer
    rotary_class = PartialRotaryEmbedding


class Glm4ForCausalLM(CausalLMHead, Glm4PreTrainedModel, GenerationMixin):
    backbone_class = Glm4Model


class Glm4ForSequenceClassification(SequenceClassificationHead, Glm4PreTrainedModel):
    backbone_class = Glm4Model


class Glm4ForTokenClassification(TokenClassificationHead, Glm4PreTrainedModel):
    backbone_class = Glm4Model
