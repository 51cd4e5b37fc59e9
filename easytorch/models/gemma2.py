"""Gemma 2 (arXiv:2408.00118): norms on both sides of each part, softcapped scores and logits, alternating windows."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import Gemma2Config, GenerationMixin

from easytorch.layers.config_checks import padding_of
from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.embedding import ScaledEmbedding
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.heads import CausalLMHead, SequenceClassificationHead, TokenClassificationHead
from easytorch.layers.masks import types_of_config
from easytorch.layers.mlp import GatedMLP
from easytorch.layers.norm import ZeroCenteredRMSNorm
from easytorch.protocol.native import NativeDecoder


class Gemma2MLP(GatedMLP):
    def __init__(self, config: Gemma2Config) -> None:
        super().__init__(config.hidden_size, config.intermediate_size, config.hidden_activation)


class Gemma2Attention(GroupedAttention):
    types_of_layers = staticmethod(types_of_config)

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(
            config,
            layer_idx,
            scaling=config.query_pre_attn_scalar**-0.5,
            softcap=config.attn_logit_softcapping,
        )
        self.is_causal = not config.use_bidirectional_attention


class Gemma2DecoderLayer(DecoderLayer):
    attention_class: ClassVar[type[nn.Module]] = Gemma2Attention
    mlp_class = Gemma2MLP
    norm_class = ZeroCenteredRMSNorm
    norms = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
    pre_feedforward_layernorm: nn.Module
    post_feedforward_layernorm: nn.Module

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + self.post_attention_layernorm(attended)
        mixed = self.mlp(self.pre_feedforward_layernorm(hidden_states))
        return hidden_states + self.post_feedforward_layernorm(mixed)


class Gemma2PreTrainedModel(NativeDecoder):
    config: Gemma2Config
    config_class = Gemma2Config
    _no_split_modules = ["Gemma2DecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": Gemma2DecoderLayer, "attentions": Gemma2Attention}  # noqa: RUF012


class Gemma2Model(DecoderBackbone, Gemma2PreTrainedModel):
    layer_class = Gemma2DecoderLayer

    @staticmethod
    def embedding(config: Gemma2Config) -> nn.Embedding:
        return ScaledEmbedding(config.vocab_size, config.hidden_size, padding_of(config), config.hidden_size**0.5)


class Gemma2ForCausalLM(CausalLMHead, Gemma2PreTrainedModel, GenerationMixin):
    backbone_class = Gemma2Model

    def finish_logits(self, logits: torch.Tensor) -> torch.Tensor:
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def logits_finish(self) -> tuple[float, float | None]:
        return 1.0, self.config.final_logit_softcapping


class Gemma2ForSequenceClassification(SequenceClassificationHead, Gemma2PreTrainedModel):
    backbone_class = Gemma2Model


class Gemma2ForTokenClassification(TokenClassificationHead, Gemma2PreTrainedModel):
    backbone_class = Gemma2Model
