"""SmolLM 3: Llama's decoder, some of whose layers have no positions (NoPE)."""

from __future__ import annotations

from typing import Any

from transformers import GenerationMixin, SmolLM3Config

from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.heads import (
    CausalLMHead,
    QuestionAnsweringHead,
    SequenceClassificationHead,
    TokenClassificationHead,
)
from easytorch.layers.masks import types_of_config
from easytorch.models.llama import LlamaMLP
from easytorch.protocol.native import NativeDecoder


class SmolLM3Attention(GroupedAttention):
    types_of_layers = staticmethod(types_of_config)

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        if len(config.no_rope_layers) < config.num_hidden_layers:
            raise ValueError(
                f"smollm3: config.no_rope_layers has {len(config.no_rope_layers)} entries for "
                f"num_hidden_layers={config.num_hidden_layers}"
            )
        self.use_rope = bool(config.no_rope_layers[layer_idx])  # 1 where a layer has rotary positions


class SmolLM3DecoderLayer(DecoderLayer):
    attention_class = SmolLM3Attention
    mlp_class = LlamaMLP


class SmolLM3PreTrainedModel(NativeDecoder):
    config: SmolLM3Config
    config_class = SmolLM3Config
    _no_split_modules = ["SmolLM3DecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": SmolLM3DecoderLayer, "attentions": SmolLM3Attention}  # noqa: RUF012


class SmolLM3Model(DecoderBackbone, SmolLM3PreTrainedModel):
    layer_class = SmolLM3DecoderLayer


class SmolLM3ForCausalLM(CausalLMHead, SmolLM3PreTrainedModel, GenerationMixin):
    backbone_class = SmolLM3Model


class SmolLM3ForSequenceClassification(SequenceClassificationHead, SmolLM3PreTrainedModel):
    backbone_class = SmolLM3Model


class SmolLM3ForTokenClassification(TokenClassificationHead, SmolLM3PreTrainedModel):
    backbone_class = SmolLM3Model


class SmolLM3ForQuestionAnswering(QuestionAnsweringHead, SmolLM3PreTrainedModel):
    base_model_prefix = "transformer"  # the name its checkpoints have on disk
    backbone_class = SmolLM3Model
