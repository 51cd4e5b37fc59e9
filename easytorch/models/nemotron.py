"""Nemotron (arXiv:2402.16819): squared ReLU without a gate, partial rotary positions, zero-centered layer norms."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationMixin, NemotronConfig

from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.heads import (
    CausalLMHead,
    QuestionAnsweringHead,
    SequenceClassificationHead,
    TokenClassificationHead,
)
from easytorch.layers.mlp import PlainMLP
from easytorch.layers.norm import LayerNorm, layer_norm
from easytorch.layers.rotary import PartialRotaryEmbedding
from easytorch.protocol.native import NativeDecoder


class UngatedMLP(PlainMLP):
    def __init__(self, config: Any) -> None:
        super().__init__(config.hidden_size, config.intermediate_size, config.hidden_act, bias=config.mlp_bias)


class NemotronLayerNorm1P(LayerNorm):
    """(x - mean(x)) / std(x) * (1 + weight) + bias."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return layer_norm(input, self.weight + 1.0, self.bias, self.eps)


class NemotronAttention(GroupedAttention):
    @property
    def partial_rotary_factor(self) -> float:
        factor: float = self.config.rope_parameters["partial_rotary_factor"]
        return factor


class NemotronDecoderLayer(DecoderLayer):
    attention_class = NemotronAttention
    mlp_class = UngatedMLP
    norm_class = NemotronLayerNorm1P
    norm_eps = "norm_eps"


class NemotronPreTrainedModel(NativeDecoder):
    config: NemotronConfig
    config_class = NemotronConfig
    _no_split_modules = ["NemotronDecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": NemotronDecoderLayer, "attentions": NemotronAttention}  # noqa: RUF012


class NemotronModel(DecoderBackbone, NemotronPreTrainedModel):
    layer_class = NemotronDecoderLayer
    rotary_class = PartialRotaryEmbedding


class NemotronForCausalLM(CausalLMHead, NemotronPreTrainedModel, GenerationMixin):
    backbone_class = NemotronModel
    _pp_plan = _fsdp_plan = None  # transformers has none


class NemotronForSequenceClassification(SequenceClassificationHead, NemotronPreTrainedModel):
    backbone_class = NemotronModel


class NemotronForQuestionAnswering(QuestionAnsweringHead, NemotronPreTrainedModel):
    base_model_prefix = "transformer"  # the name its checkpoints have on disk
    backbone_class = NemotronModel


class NemotronForTokenClassification(TokenClassificationHead, NemotronPreTrainedModel):
    backbone_class = NemotronModel
