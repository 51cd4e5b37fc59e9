"""Qwen 3 (arXiv:2505.09388): Llama's decoder with queries and keys normalised by head, and windows in some layers."""

from __future__ import annotations

from transformers import GenerationMixin, Qwen3Config

from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.head_norm import HeadNormAttention
from easytorch.layers.heads import (
    CausalLMHead,
    QuestionAnsweringHead,
    SequenceClassificationHead,
    TokenClassificationHead,
)
from easytorch.layers.masks import types_of_config
from easytorch.layers.mlp import GatedMLP
from easytorch.protocol.native import NativeDecoder


class Qwen3MLP(GatedMLP):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config.hidden_size, config.intermediate_size, config.hidden_act)


class Qwen3Attention(HeadNormAttention):
    types_of_layers = staticmethod(types_of_config)


class Qwen3DecoderLayer(DecoderLayer):
    attention_class = Qwen3Attention
    mlp_class = Qwen3MLP


class Qwen3PreTrainedModel(NativeDecoder):
    config: Qwen3Config
    config_class = Qwen3Config
    _no_split_modules = ["Qwen3DecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": Qwen3DecoderLayer, "attentions": Qwen3Attention}  # noqa: RUF012


class Qwen3Model(DecoderBackbone, Qwen3PreTrainedModel):
    layer_class = Qwen3DecoderLayer


class Qwen3ForCausalLM(CausalLMHead, Qwen3PreTrainedModel, GenerationMixin):
    backbone_class = Qwen3Model


class Qwen3ForSequenceClassification(SequenceClassificationHead, Qwen3PreTrainedModel):
    backbone_class = Qwen3Model


class Qwen3ForTokenClassification(TokenClassificationHead, Qwen3PreTrainedModel):
    backbone_class = Qwen3Model


class Qwen3ForQuestionAnswering(QuestionAnsweringHead, Qwen3PreTrainedModel):
    base_model_prefix = "transformer"  # the name its checkpoints have on disk
    backbone_class = Qwen3Model
