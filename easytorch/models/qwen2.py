"""Qwen 2 (arXiv:2407.10671): Llama's decoder with biases of query, key and value, and windows in some layers."""

from __future__ import annotations

from typing import Any

from transformers import GenerationMixin, Qwen2Config

from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.heads import (
    CausalLMHead,
    QuestionAnsweringHead,
    SequenceClassificationHead,
    TokenClassificationHead,
)
from easytorch.layers.masks import types_of_config
from easytorch.models.mistral import MistralMLP
from easytorch.protocol.native import NativeDecoder


class Qwen2Attention(GroupedAttention):
    types_of_layers = staticmethod(types_of_config)

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx, bias=True, out_bias=False)


class Qwen2DecoderLayer(DecoderLayer):
    attention_class = Qwen2Attention
    mlp_class = MistralMLP


class Qwen2PreTrainedModel(NativeDecoder):
    config: Qwen2Config
    config_class = Qwen2Config
    _no_split_modules = ["Qwen2DecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": Qwen2DecoderLayer, "attentions": Qwen2Attention}  # noqa: RUF012


class Qwen2Model(DecoderBackbone, Qwen2PreTrainedModel):
    layer_class = Qwen2DecoderLayer


class Qwen2ForCausalLM(CausalLMHead, Qwen2PreTrainedModel, GenerationMixin):
    backbone_class = Qwen2Model


class Qwen2ForSequenceClassification(SequenceClassificationHead, Qwen2PreTrainedModel):
    backbone_class = Qwen2Model


class Qwen2ForTokenClassification(TokenClassificationHead, Qwen2PreTrainedModel):
    backbone_class = Qwen2Model


class Qwen2ForQuestionAnswering(QuestionAnsweringHead, Qwen2PreTrainedModel):
    base_model_prefix = "transformer"  # the name its checkpoints have on disk
    backbone_class = Qwen2Model
