"""Command R7B, Command A: Cohere's decoder with sliding windows in most layers, and no positions in the others."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cohere2Config, GenerationMixin

from easytorch.layers.decoder import DecoderBackbone
from easytorch.layers.heads import CausalLMHead
from easytorch.layers.masks import SLIDING, types_of_config
from easytorch.layers.stock_names import given_by
from easytorch.models.cohere import CohereAttention, CohereDecoderLayer, CohereRotaryEmbedding
from easytorch.protocol.native import NativeDecoder


class Cohere2Attention(CohereAttention):
    types_of_layers = staticmethod(types_of_config)

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.use_rope = self.layer_type == SLIDING


class Cohere2DecoderLayer(CohereDecoderLayer):
    attention_class = Cohere2Attention


class Cohere2PreTrainedModel(NativeDecoder):
    config: Cohere2Config
    config_class = Cohere2Config
    _no_split_modules = ["Cohere2DecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": Cohere2DecoderLayer, "attentions": Cohere2Attention}  # noqa: RUF012


class Cohere2Model(DecoderBackbone, Cohere2PreTrainedModel):
    layer_class = Cohere2DecoderLayer
    rotary_class = CohereRotaryEmbedding


class Cohere2ForCausalLM(CausalLMHead, Cohere2PreTrainedModel, GenerationMixin):
    tie_word_embeddings = given_by("config.tie_word_embeddings")
    backbone_class = Cohere2Model

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.logit_scale = config.logit_scale

    def finish_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return logits * self.logit_scale

    def logits_finish(self) -> tuple[float, float | None]:
        return self.logit_scale, None
