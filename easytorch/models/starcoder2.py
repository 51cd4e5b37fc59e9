"""StarCoder 2 (arXiv:2402.19173): layer norms, biases everywhere, an MLP without a gate, and dropout."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, Starcoder2Config

from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.heads import CausalLMHead, SequenceClassificationHead, TokenClassificationHead
from easytorch.layers.masks import all_within_window
from easytorch.layers.mlp import PlainMLP
from easytorch.layers.norm import LayerNorm
from easytorch.layers.stock_names import given_by
from easytorch.protocol.native import NativeDecoder


class Starcoder2MLP(PlainMLP):
    up_name, down_name, act_name = "c_fc", "c_proj", "act"

    def __init__(self, config: Any) -> None:
        super().__init__(config.hidden_size, config.intermediate_size, config.hidden_act, bias=config.use_bias)
        self.residual_dropout = config.residual_dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), self.residual_dropout, self.training)


class Starcoder2Attention(GroupedAttention):
    types_of_layers = staticmethod(all_within_window)

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx, bias=config.use_bias)
        self.residual_dropout = config.residual_dropout

    def project_output(self, attended: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().project_output(attended), self.residual_dropout, self.training)


class Starcoder2DecoderLayer(DecoderLayer):
    attention_class = Starcoder2Attention
    mlp_class = Starcoder2MLP
    norm_class = LayerNorm
    norm_eps = "norm_epsilon"


class Starcoder2PreTrainedModel(NativeDecoder):
    config: Starcoder2Config
    config_class = Starcoder2Config
    _no_split_modules = ["Starcoder2DecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": Starcoder2DecoderLayer, "attentions": Starcoder2Attention}  # noqa: RUF012


class Starcoder2Model(DecoderBackbone, Starcoder2PreTrainedModel):
    embedding_dropout = given_by("config.embedding_dropout")
    layer_class = Starcoder2DecoderLayer

    def enter(self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(inputs_embeds, self.config.embedding_dropout, self.training)


class Starcoder2ForCausalLM(CausalLMHead, Starcoder2PreTrainedModel, GenerationMixin):
    backbone_class = Starcoder2Model


class Starcoder2ForSequenceClassification(SequenceClassificationHead, Starcoder2PreTrainedModel):
    backbone_class = Starcoder2Model


class Starcoder2ForTokenClassification(TokenClassificationHead, Starcoder2PreTrainedModel):
    backbone_class = Starcoder2Model
