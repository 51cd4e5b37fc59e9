"""Granite 3: Llama's decoder with multipliers of the embeddings, the scores, the residual branches and the logits."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationMixin, GraniteConfig

from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.heads import CausalLMHead
from easytorch.models.llama import LlamaMLP
from easytorch.protocol.native import NativeDecoder


class GraniteAttention(GroupedAttention):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx, scaling=config.attention_multiplier)


class GraniteDecoderLayer(DecoderLayer):
    attention_class = GraniteAttention
    mlp_class = LlamaMLP

    def add_modules(self, config: Any, layer_idx: int) -> None:
        super().add_modules(config, layer_idx)
        self.residual_multiplier = config.residual_multiplier

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended * self.residual_multiplier
        mixed = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + mixed * self.residual_multiplier


class GranitePreTrainedModel(NativeDecoder):
    config: GraniteConfig
    config_class = GraniteConfig
    _no_split_modules = ["GraniteDecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": GraniteDecoderLayer, "attentions": GraniteAttention}  # noqa: RUF012


class GraniteModel(DecoderBackbone, GranitePreTrainedModel):
    layer_class = GraniteDecoderLayer

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embedding_multiplier = config.embedding_multiplier

    def enter(self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return inputs_embeds * self.embedding_multiplier


class GraniteForCausalLM(CausalLMHead, GranitePreTrainedModel, GenerationMixin):
    backbone_class = GraniteModel

    def finish_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return logits / self.config.logits_scaling

    def logits_finish(self) -> tuple[float, float | None]:
        return 1.0 / self.config.logits_scaling, None
