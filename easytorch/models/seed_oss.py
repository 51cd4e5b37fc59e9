"""Seed-OSS: Llama's decoder with dropout after attention and MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, SeedOssConfig

from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.heads import (
    CausalLMHead,
    QuestionAnsweringHead,
    SequenceClassificationHead,
    TokenClassificationHead,
)
from easytorch.models.llama import LlamaMLP
from easytorch.protocol.native import NativeDecoder


class SeedOssMLP(LlamaMLP):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.residual_dropout = config.residual_dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), self.residual_dropout, self.training)


class SeedOssAttention(GroupedAttention):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx, out_bias=config.attention_out_bias)
        self.residual_dropout = config.residual_dropout

    def project_output(self, attended: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().project_output(attended), self.residual_dropout, self.training)


class SeedOssDecoderLayer(DecoderLayer):
    attention_class = SeedOssAttention
    mlp_class = SeedOssMLP


class SeedOssPreTrainedModel(NativeDecoder):
    config: SeedOssConfig
    config_class = SeedOssConfig
    _no_split_modules = ["SeedOssDecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": SeedOssDecoderLayer, "attentions": SeedOssAttention}  # noqa: RUF012


class SeedOssModel(DecoderBackbone, SeedOssPreTrainedModel):
    layer_class = SeedOssDecoderLayer


class SeedOssForCausalLM(CausalLMHead, SeedOssPreTrainedModel, GenerationMixin):
    backbone_class = SeedOssModel


class SeedOssForSequenceClassification(SequenceClassificationHead, SeedOssPreTrainedModel):
    backbone_class = SeedOssModel


class SeedOssForTokenClassification(TokenClassificationHead, SeedOssPreTrainedModel):
    backbone_class = SeedOssModel


class SeedOssForQuestionAnswering(QuestionAnsweringHead, SeedOssPreTrainedModel):
    base_model_prefix = "transformer"  # the name its checkpoints have on disk
    backbone_class = SeedOssModel
