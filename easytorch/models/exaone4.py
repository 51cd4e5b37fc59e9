"""EXAONE 4 (arXiv:2507.11407): Qwen 3's attention in OLMo 2's layers; full attention has no positions (NoPE)."""

from __future__ import annotations

from typing import Any

from transformers import Exaone4Config, GenerationMixin

from easytorch.layers.decoder import DecoderBackbone
from easytorch.layers.heads import (
    CausalLMHead,
    QuestionAnsweringHead,
    SequenceClassificationHead,
    TokenClassificationHead,
)
from easytorch.layers.masks import SLIDING
from easytorch.layers.norm import RMSNorm
from easytorch.layers.stock_names import given_by
from easytorch.models.olmo2 import Olmo2DecoderLayer
from easytorch.models.qwen3 import Qwen3Attention
from easytorch.protocol.native import NativeDecoder


class Exaone4Attention(Qwen3Attention):
    sliding_window_pattern = given_by("config.sliding_window_pattern")

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx, bias=False)
        self.use_rope = config.sliding_window is None or self.layer_type == SLIDING


class Exaone4DecoderLayer(Olmo2DecoderLayer):
    attention_class = Exaone4Attention
    norm_class = RMSNorm


class Exaone4PreTrainedModel(NativeDecoder):
    config: Exaone4Config
    config_class = Exaone4Config
    _no_split_modules = ["Exaone4DecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": Exaone4DecoderLayer, "attentions": Exaone4Attention}  # noqa: RUF012


class Exaone4Model(DecoderBackbone, Exaone4PreTrainedModel):
    layer_class = Exaone4DecoderLayer


class Exaone4ForCausalLM(CausalLMHead, Exaone4PreTrainedModel, GenerationMixin):
    backbone_class = Exaone4Model


class Exaone4ForSequenceClassification(SequenceClassificationHead, Exaone4PreTrainedModel):
    backbone_class = Exaone4Model


class Exaone4ForTokenClassification(TokenClassificationHead, Exaone4PreTrainedModel):
    backbone_class = Exaone4Model


class Exaone4ForQuestionAnswering(QuestionAnsweringHead, Exaone4PreTrainedModel):
    base_model_prefix = "transformer"  # the name its checkpoints have on disk
    backbone_class = Exaone4Model
