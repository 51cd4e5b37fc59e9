"""Mistral (arXiv:2310.06825): Llama's decoder without biases, with one window for every layer."""

from __future__ import annotations

from typing import Any

from transformers import GenerationMixin, MistralConfig, PreTrainedConfig

from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.heads import (
    CausalLMHead,
    QuestionAnsweringHead,
    SequenceClassificationHead,
    TokenClassificationHead,
)
from easytorch.layers.masks import all_within_window
from easytorch.layers.mlp import GatedMLP
from easytorch.protocol.native import NativeDecoder


class MistralMLP(GatedMLP):
    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config.hidden_size, config.intermediate_size, config.hidden_act)


class MistralAttention(GroupedAttention):
    types_of_layers = staticmethod(all_within_window)

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx, bias=False)


class MistralDecoderLayer(DecoderLayer):
    attention_class = MistralAttention
    mlp_class = MistralMLP


class MistralPreTrainedModel(NativeDecoder):
    config: MistralConfig
    config_class = MistralConfig
    _no_split_modules = ["MistralDecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": MistralDecoderLayer, "attentions": MistralAttention}  # noqa: RUF012


class MistralModel(DecoderBackbone, MistralPreTrainedModel):
    layer_class = MistralDecoderLayer


class MistralForCausalLM(CausalLMHead, MistralPreTrainedModel, GenerationMixin):
    backbone_class = MistralModel


class MistralForSequenceClassification(SequenceClassificationHead, MistralPreTrainedModel):
    backbone_class = MistralModel


class MistralForTokenClassification(TokenClassificationHead, MistralPreTrainedModel):
    backbone_class = MistralModel


class MistralForQuestionAnswering(QuestionAnsweringHead, MistralPreTrainedModel):
    backbone_class = MistralModel
