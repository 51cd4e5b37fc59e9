"""GLM 4 (arXiv:2406.12793): Phi 3's MLP, partial rotary positions with interleaved pairs."""

from __future__ import annotations

from typing import Any

from transformers import GenerationMixin, GlmConfig

from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.heads import CausalLMHead, SequenceClassificationHead, TokenClassificationHead
from easytorch.layers.rotary import PartialRotaryEmbedding
from easytorch.models.phi3 import Phi3MLP
from easytorch.protocol.native import NativeDecoder


class GlmAttention(GroupedAttention):
    interleaved = True

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx, out_bias=False)


class GlmDecoderLayer(DecoderLayer):
    attention_class = GlmAttention
    mlp_class = Phi3MLP


class GlmPreTrainedModel(NativeDecoder):
    config: GlmConfig
    config_class = GlmConfig
    _no_split_modules = ["GlmDecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": GlmDecoderLayer, "attentions": GlmAttention}  # noqa: RUF012


class GlmModel(DecoderBackbone, GlmPreTrainedModel):
    layer_class = GlmDecoderLayer
    rotary_class = PartialRotaryEmbedding


class GlmForCausalLM(CausalLMHead, GlmPreTrainedModel, GenerationMixin):
    backbone_class = GlmModel


class GlmForSequenceClassification(SequenceClassificationHead, GlmPreTrainedModel):
    backbone_class = GlmModel


class GlmForTokenClassification(TokenClassificationHead, GlmPreTrainedModel):
    backbone_class = GlmModel
