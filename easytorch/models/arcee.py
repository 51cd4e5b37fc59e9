"""AFM (Arcee): Llama's decoder with Nemotron's MLP."""

from __future__ import annotations

from transformers import ArceeConfig, GenerationMixin

from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.heads import (
    CausalLMHead,
    QuestionAnsweringHead,
    SequenceClassificationHead,
    TokenClassificationHead,
)
from easytorch.models.llama import LlamaAttention
from easytorch.models.nemotron import UngatedMLP
from easytorch.protocol.native import NativeDecoder


class ArceeAttention(LlamaAttention):
    pass


class ArceeDecoderLayer(DecoderLayer):
    attention_class = ArceeAttention
    mlp_class = UngatedMLP


class ArceePreTrainedModel(NativeDecoder):
    config: ArceeConfig
    config_class = ArceeConfig
    _no_split_modules = ["ArceeDecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": ArceeDecoderLayer, "attentions": ArceeAttention}  # noqa: RUF012


class ArceeModel(DecoderBackbone, ArceePreTrainedModel):
    layer_class = ArceeDecoderLayer


class ArceeForCausalLM(CausalLMHead, ArceePreTrainedModel, GenerationMixin):
    backbone_class = ArceeModel


class ArceeForSequenceClassification(SequenceClassificationHead, ArceePreTrainedModel):
    backbone_class = ArceeModel


class ArceeForQuestionAnswering(QuestionAnsweringHead, ArceePreTrainedModel):
    base_model_prefix = "transformer"  # the name its checkpoints have on disk
    backbone_class = ArceeModel


class ArceeForTokenClassification(TokenClassificationHead, ArceePreTrainedModel):
    backbone_class = ArceeModel
