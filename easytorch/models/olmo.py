"""OLMo (arXiv:2402.00838): Llama's decoder with layer norms without weights and projections that are clipped."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, OlmoConfig

from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.heads import CausalLMHead, SequenceClassificationHead
from easytorch.layers.norm import LayerNorm
from easytorch.layers.rotary import Float32RotaryEmbedding
from easytorch.models.mistral import MistralMLP
from easytorch.protocol.native import NativeDecoder


class OlmoAttention(GroupedAttention):
    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        projected, bound = super().project(hidden_states), self.config.clip_qkv
        return projected if bound is None else tuple(one.clamp(-bound, bound) for one in projected)


class OlmoDecoderLayer(DecoderLayer):
    attention_class = OlmoAttention
    mlp_class = MistralMLP

    @classmethod
    def new_norm(cls, config: Any) -> nn.Module:
        return LayerNorm(config.hidden_size, eps=1e-5, elementwise_affine=False)


class OlmoPreTrainedModel(NativeDecoder):
    config: OlmoConfig
    config_class = OlmoConfig
    _no_split_modules = ["OlmoDecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": OlmoDecoderLayer, "attentions": OlmoAttention}  # noqa: RUF012


class OlmoModel(DecoderBackbone, OlmoPreTrainedModel):
    layer_class = OlmoDecoderLayer
    rotary_class = Float32RotaryEmbedding


class OlmoForCausalLM(CausalLMHead, OlmoPreTrainedModel, GenerationMixin):
    backbone_class = OlmoModel


class OlmoForSequenceClassification(SequenceClassificationHead, OlmoPreTrainedModel):
    backbone_class = OlmoModel
