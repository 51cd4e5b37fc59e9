"""Phi (arXiv:2306.11644, 2309.05463): attention and MLP in parallel, partial rotary positions, biases everywhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, PhiConfig

from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.heads import CausalLMHead, SequenceClassificationHead, TokenClassificationHead
from easytorch.layers.mlp import PlainMLP
from easytorch.layers.norm import LayerNorm
from easytorch.layers.rotary import PartialRotaryEmbedding
from easytorch.protocol.native import NativeDecoder


class PhiMLP(PlainMLP):
    up_name, down_name, act_name = "fc1", "fc2", "activation_fn"

    def __init__(self, config: Any) -> None:
        super().__init__(config.hidden_size, config.intermediate_size, config.hidden_act, bias=True)


class PhiAttention(GroupedAttention):
    output_name = "dense"

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx, bias=True)
        self.qk_layernorm = config.qk_layernorm
        if self.qk_layernorm:
            self.q_layernorm = LayerNorm(self.head_dim, eps=config.layer_norm_eps)
            self.k_layernorm = LayerNorm(self.head_dim, eps=config.layer_norm_eps)

    def rotate(self, query: torch.Tensor, key: torch.Tensor, *positions: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if self.qk_layernorm:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        return super().rotate(query, key, *positions)


class PhiDecoderLayer(DecoderLayer):
    """attention(norm(x)) + mlp(norm(x)) + x."""

    attention_class = PhiAttention
    mlp_class = PhiMLP
    norm_class = LayerNorm
    norm_eps = "layer_norm_eps"
    norms = ("input_layernorm",)

    def add_modules(self, config: Any, layer_idx: int) -> None:
        super().add_modules(config, layer_idx)
        self.resid_dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        normalized = self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(hidden_states=normalized, **kwargs)
        return self.resid_dropout(attended) + self.resid_dropout(self.mlp(normalized)) + hidden_states


class PhiPreTrainedModel(NativeDecoder):
    config: PhiConfig
    config_class = PhiConfig
    _no_split_modules = ["PhiDecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": PhiDecoderLayer, "attentions": PhiAttention}  # noqa: RUF012


class PhiModel(DecoderBackbone, PhiPreTrainedModel):
    layer_class = PhiDecoderLayer
    rotary_class = PartialRotaryEmbedding
    norm_name = "final_layernorm"

    def add_modules(self, config: Any) -> None:
        super().add_modules(config)
        self.embed_dropout = nn.Dropout(config.embd_pdrop)

    def enter(self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return self.embed_dropout(inputs_embeds)


class PhiForCausalLM(CausalLMHead, PhiPreTrainedModel, GenerationMixin):
    backbone_class = PhiModel
    lm_head_bias = True


class PhiForSequenceClassification(SequenceClassificationHead, PhiPreTrainedModel):
    backbone_class = PhiModel


class PhiForTokenClassification(TokenClassificationHead, PhiPreTrainedModel):
    backbone_class = PhiModel
