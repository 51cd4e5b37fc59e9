"""Gemma (arXiv:2403.08295): Llama's decoder with scaled embeddings and norms whose weights start at zero."""

from __future__ import annotations

from typing import Any

from transformers import GemmaConfig, GenerationMixin

from easytorch.layers.decoder import DecoderLayer
from easytorch.layers.embedding import ScaledBackbone
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.heads import CausalLMHead, SequenceClassificationHead, TokenClassificationHead
from easytorch.layers.norm import ZeroCenteredRMSNorm
from easytorch.models.mistral import MistralMLP
from easytorch.protocol.native import NativeDecoder


class GemmaAttention(GroupedAttention):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.is_causal = not config.use_bidirectional_attention


class GemmaDecoderLayer(DecoderLayer):
    attention_class = GemmaAttention
    mlp_class = MistralMLP
    norm_class = ZeroCenteredRMSNorm


class GemmaPreTrainedModel(NativeDecoder):
    config: GemmaConfig
    config_class = GemmaConfig
    _no_split_modules = ["GemmaDecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": GemmaDecoderLayer, "attentions": GemmaAttention}  # noqa: RUF012


class GemmaModel(ScaledBackbone, GemmaPreTrainedModel):
    layer_class = GemmaDecoderLayer


class GemmaForCausalLM(CausalLMHead, GemmaPreTrainedModel, GenerationMixin):
    backbone_class = GemmaModel


class GemmaForSequenceClassification(SequenceClassificationHead, GemmaPreTrainedModel):
    backbone_class = GemmaModel


class GemmaForTokenClassification(TokenClassificationHead, GemmaPreTrainedModel):
    backbone_class = GemmaModel
