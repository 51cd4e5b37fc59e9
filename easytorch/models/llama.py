"""Llama (arXiv:2302.13971, 2307.09288): a decoder of RMSNorm, rotary attention with grouped heads, and a gated MLP.

Class, parameter and argument names are transformers', so its checkpoints, Trainer, PEFT and generate work unchanged.
"""

from __future__ import annotations

from transformers import GenerationMixin, LlamaConfig

from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.heads import (
    CausalLMHead,
    QuestionAnsweringHead,
    SequenceClassificationHead,
    TokenClassificationHead,
)
from easytorch.layers.mlp import GatedMLP
from easytorch.models._llama_rules import RULES as RULES
from easytorch.protocol.native import NativeDecoder


class LlamaMLP(GatedMLP):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config.hidden_size, config.intermediate_size, config.hidden_act, bias=config.mlp_bias)


class LlamaAttention(GroupedAttention):
    pass


class LlamaDecoderLayer(DecoderLayer):
    attention_class = LlamaAttention
    mlp_class = LlamaMLP


class LlamaPreTrainedModel(NativeDecoder):
    config: LlamaConfig
    config_class = LlamaConfig
    _no_split_modules = ["LlamaDecoderLayer"]  # noqa: RUF012 - transformers copies it into a set
    _can_record_outputs = {"hidden_states": LlamaDecoderLayer, "attentions": LlamaAttention}  # noqa: RUF012


class LlamaModel(DecoderBackbone, LlamaPreTrainedModel):
    layer_class = LlamaDecoderLayer


class LlamaForCausalLM(CausalLMHead, LlamaPreTrainedModel, GenerationMixin):
    backbone_class = LlamaModel


class LlamaForSequenceClassification(SequenceClassificationHead, LlamaPreTrainedModel):
    backbone_class = LlamaModel


class LlamaForTokenClassification(TokenClassificationHead, LlamaPreTrainedModel):
    backbone_class = LlamaModel


class LlamaForQuestionAnswering(QuestionAnsweringHead, LlamaPreTrainedModel):
    base_model_prefix = "transformer"  # the name its checkpoints have on disk
    backbone_class = LlamaModel
