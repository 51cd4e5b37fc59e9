"""Ministral 3: Mistral's decoder, with queries scaled by the logarithm of their position, as in Llama 4."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationMixin, Ministral3Config

from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.heads import (
    CausalLMHead,
    QuestionAnsweringHead,
    SequenceClassificationHead,
    TokenClassificationHead,
)
from easytorch.models.mistral import MistralAttention, MistralMLP
from easytorch.protocol.native import NativeDecoder


class Ministral3Attention(MistralAttention):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        rope, needed = config.rope_parameters, ("llama_4_scaling_beta", "original_max_position_embeddings")
        if missing := [name for name in needed if rope.get(name) is None]:
            raise ValueError(f"ministral3: config.rope_parameters needs {' and '.join(missing)}, got {rope}")
        self.beta, self.trained_length = (rope[name] for name in needed)

    def rotate(
        self, query: torch.Tensor, key: torch.Tensor, position_embeddings: Any, position_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        query, key = super().rotate(query, key, position_embeddings, position_ids)
        assert position_ids is not None, "the model passes them"
        scale = 1 + self.beta * torch.log(1 + torch.floor(position_ids / self.trained_length))
        return query * scale[:, :, None, None].to(query.dtype), key


class Ministral3DecoderLayer(DecoderLayer):
    attention_class = Ministral3Attention
    mlp_class = MistralMLP


class Ministral3PreTrainedModel(NativeDecoder):
    config: Ministral3Config
    config_class = Ministral3Config
    _no_split_modules = ["Ministral3DecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": Ministral3DecoderLayer, "attentions": Ministral3Attention}  # noqa: RUF012


class Ministral3Model(DecoderBackbone, Ministral3PreTrainedModel):
    layer_class = Ministral3DecoderLayer


class Ministral3ForCausalLM(CausalLMHead, Ministral3PreTrainedModel, GenerationMixin):
    backbone_class = Ministral3Model


class Ministral3ForTokenClassification(TokenClassificationHead, Ministral3PreTrainedModel):
    backbone_class = Ministral3Model


class Ministral3ForSequenceClassification(SequenceClassificationHead, Ministral3PreTrainedModel):
    backbone_class = Ministral3Model


class Ministral3ForQuestionAnswering(QuestionAnsweringHead, Ministral3PreTrainedModel):
    backbone_class = Ministral3Model
