"""Gemma 3's text model (arXiv:2503.19786): Gemma 2's layers, norms of queries and keys, rotary by layer type.

EmbeddingGemma is this model with `use_bidirectional_attention`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import Cache, Gemma3TextConfig, GenerationMixin

from easytorch.layers import sequence_parallel
from easytorch.layers.embedding import ScaledBackbone
from easytorch.layers.head_norm import HeadNormAttention
from easytorch.layers.heads import SequenceClassificationHead, SoftcappedCausalLMHead
from easytorch.layers.masks import FULL, SLIDING, Masks, masks_by_layer_type, types_of_config
from easytorch.layers.norm import ZeroCenteredRMSNorm
from easytorch.layers.rotary import LayerTypeRotaryEmbedding
from easytorch.layers.stock_names import given_by
from easytorch.models.gemma2 import Gemma2DecoderLayer, score_scale
from easytorch.protocol.native import NativeDecoder


class Gemma3Attention(HeadNormAttention):
    types_of_layers = staticmethod(types_of_config)
    norm_class = ZeroCenteredRMSNorm

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx, scaling=score_scale(config))
        self.is_causal = not config.use_bidirectional_attention


class Gemma3DecoderLayer(Gemma2DecoderLayer):
    layer_idx = given_by("self_attn.layer_idx")
    attention_class = Gemma3Attention


class Gemma3PreTrainedModel(NativeDecoder):
    config: Gemma3TextConfig
    config_class = Gemma3TextConfig
    _no_split_modules = ["Gemma3DecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": Gemma3DecoderLayer, "attentions": Gemma3Attention}  # noqa: RUF012


class Gemma3TextModel(ScaledBackbone, Gemma3PreTrainedModel):
    layer_class = Gemma3DecoderLayer
    rotary_class = LayerTypeRotaryEmbedding

    def make_masks(
        self,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | Mapping[str, Any] | None,
        cache: Cache | None,
        position_ids: torch.Tensor | None,
    ) -> Masks:
        also_seen = None
        if self.config.use_bidirectional_attention:
            window = self.config.sliding_window
            also_seen = {FULL: lambda b, h, q, k: q >= 0, SLIDING: lambda b, h, q, k: abs(q - k) < window}
        return masks_by_layer_type(
            self.config, self.layer_types, inputs_embeds, attention_mask, cache, position_ids, also_seen
        )

    def sequence_refusal(self) -> str | None:
        return sequence_parallel.refusal(self)  # the masks above are causal where it is not bidirectional


class Gemma3ForCausalLM(SoftcappedCausalLMHead, Gemma3PreTrainedModel, GenerationMixin):
    backbone_class = Gemma3TextModel


class Gemma3TextForSequenceClassification(SequenceClassificationHead, Gemma3PreTrainedModel):
    backbone_class = Gemma3TextModel
