"""Ministral (2410): Mistral's decoder with a window in the layers that the config names."""

from __future__ import annotations

from transformers import GenerationMixin, MinistralConfig

from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.heads import (
    CausalLMHead,
    QuestionAnsweringHead,
    SequenceClassificationHead,
    TokenClassificationHead,
)
from easytorch.layers.masks import types_of_config
from easytorch.models.mistral import MistralAttention, MistralMLP
from easytorch.protocol.native import NativeDecoder


class MinistralAttention(MistralAttention):
    types_of_layers = staticmethod(types_of_config)


class MinistralDecoderLayer(DecoderLayer):
    attention_class = MinistralAttention
    mlp_class = MistralMLP


class MinistralPreTrainedModel(NativeDecoder):
    config: MinistralConfig
    config_class = MinistralConfig
    _no_split_modules = ["MinistralDecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": MinistralDecoderLayer, "attentions": MinistralAttention}  # noqa: RUF012


class MinistralModel(DecoderBackbone, MinistralPreTrainedModel):
    layer_class = MinistralDecoderLayer


class MinistralForCausalLM(CausalLMHead, MinistralPreTrainedModel, GenerationMixin):
    backbone_class = MinistralModel


class MinistralForSequenceClassification(SequenceClassificationHead, MinistralPreTrainedModel):
    backbone_class = MinistralModel


class MinistralForTokenClassification(TokenClassificationHead, MinistralPreTrainedModel):
    backbone_class = MinistralModel


class MinistralForQuestionAnswering(QuestionAnsweringHead, MinistralPreTrainedModel):
    base_model_prefix = "transformer"  # the name its checkpoints have on disk
    backbone_class = MinistralModel
