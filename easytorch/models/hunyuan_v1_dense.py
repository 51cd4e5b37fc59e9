"""Hunyuan dense: Llama's decoder with queries and keys normalised by head after their rotation."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationMixin, HunYuanDenseV1Config

from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.heads import CausalLMHead, SequenceClassificationHead
from easytorch.layers.norm import RMSNorm
from easytorch.layers.rotary import Frequencies, RotaryEmbedding, head_dim_of
from easytorch.layers.stock_names import given_by
from easytorch.models.mistral import MistralMLP
from easytorch.protocol.native import NativeDecoder


class HunYuanDenseV1RotaryEmbedding(RotaryEmbedding):
    """With `alpha`, the "dynamic" type has one NTK-scaled base, whatever the length."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if self._alpha():
            self.rope_type = "ntk_alpha"  # whose frequencies do not depend on the length

    def _alpha(self) -> float | None:
        rope = self.config.rope_parameters
        return rope.get("alpha") if rope["rope_type"] == "dynamic" else None

    def initial_frequencies(self) -> Frequencies:
        alpha, dim = self._alpha(), head_dim_of(self.config)
        if not alpha:
            return super().initial_frequencies()
        theta = self.config.rope_parameters["rope_theta"] * alpha ** (dim / (dim - 2))
        return self.frequencies(self.config, {"rope_type": "default", "rope_theta": theta})


class HunYuanDenseV1Attention(GroupedAttention):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.query_layernorm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.key_layernorm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def rotate(self, query: torch.Tensor, key: torch.Tensor, *positions: Any) -> tuple[torch.Tensor, torch.Tensor]:
        query, key = super().rotate(query, key, *positions)
        return self.query_layernorm(query), self.key_layernorm(key)


class HunYuanDenseV1DecoderLayer(DecoderLayer):
    layer_idx = given_by("self_attn.layer_idx")
    attention_class = HunYuanDenseV1Attention
    mlp_class = MistralMLP


class HunYuanDenseV1PreTrainedModel(NativeDecoder):
    config: HunYuanDenseV1Config
    config_class = HunYuanDenseV1Config
    _no_split_modules = ["HunYuanDenseV1DecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": HunYuanDenseV1DecoderLayer, "attentions": HunYuanDenseV1Attention}  # noqa: RUF012


class HunYuanDenseV1Model(DecoderBackbone, HunYuanDenseV1PreTrainedModel):
    layer_class = HunYuanDenseV1DecoderLayer
    rotary_class = HunYuanDenseV1RotaryEmbedding


class HunYuanDenseV1ForCausalLM(CausalLMHead, HunYuanDenseV1PreTrainedModel, GenerationMixin):
    backbone_class = HunYuanDenseV1Model


class HunYuanDenseV1ForSequenceClassification(SequenceClassificationHead, HunYuanDenseV1PreTrainedModel):
    backbone_class = HunYuanDenseV1Model
