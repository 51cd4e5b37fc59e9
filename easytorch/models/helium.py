"""Helium 1: Llama's decoder with interleaved rotary pairs, and norms in float32 throughout."""

from __future__ import annotations

from typing import Any

from transformers import GenerationMixin, HeliumConfig

from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.heads import CausalLMHead, SequenceClassificationHead, TokenClassificationHead
from easytorch.layers.norm import Float32RMSNorm
from easytorch.models.llama import LlamaMLP
from easytorch.protocol.native import NativeDecoder


class HeliumAttention(GroupedAttention):
    interleaved = True

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx, out_bias=False)


class HeliumDecoderLayer(DecoderLayer):
    attention_class = HeliumAttention
    mlp_class = LlamaMLP
    norm_class = Float32RMSNorm


class HeliumPreTrainedModel(NativeDecoder):
    config: HeliumConfig
    config_class = HeliumConfig
    _no_split_modules = ["HeliumDecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": HeliumDecoderLayer, "attentions": HeliumAttention}  # noqa: RUF012


class HeliumModel(DecoderBackbone, HeliumPreTrainedModel):
    layer_class = HeliumDecoderLayer


class HeliumForCausalLM(CausalLMHead, HeliumPreTrainedModel, GenerationMixin):
    backbone_class = HeliumModel


class HeliumForSequenceClassification(SequenceClassificationHead, HeliumPreTrainedModel):
    backbone_class = HeliumModel


class HeliumForTokenClassification(TokenClassificationHead, HeliumPreTrainedModel):
    backbone_class = HeliumModel
