"""Gemma 2 (arXiv:2408.00118): norms on both sides of each part, softcapped scores and logits, alternating windows."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import Gemma2Config, GenerationMixin

from easytorch.layers.decoder import PrePostNormLayer
from easytorch.layers.embedding import ScaledBackbone
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.heads import SequenceClassificationHead, SoftcappedCausalLMHead, TokenClassificationHead
from easytorch.layers.masks import types_of_config
from easytorch.layers.mlp import GatedMLP
from easytorch.layers.norm import ZeroCenteredRMSNorm
from easytorch.protocol.native import NativeDecoder


class Gemma2MLP(GatedMLP):
    def __init__(self, config: Gemma2Config) -> None:
        super().__init__(config.hidden_size, config.intermediate_size, config.hidden_activation)


def score_scale(config: Any) -> float:
    """1 / sqrt(query_pre_attn_scalar). `ValueError` where that is no number."""
    if not config.query_pre_attn_scalar > 0:
        raise ValueError(
            f"{config.model_type}: config.query_pre_attn_scalar={config.query_pre_attn_scalar} must be more than 0"
        )
    scale: float = config.query_pre_attn_scalar**-0.5
    return scale


class Gemma2Attention(GroupedAttention):
    types_of_layers = staticmethod(types_of_config)

    def __init__(self, config: Any, layer_idx: int) -> None:
        scaling, softcap = score_scale(config), config.attn_logit_softcapping
        super().__init__(config, layer_idx, scaling=scaling, softcap=softcap)
        self.is_causal = not config.use_bidirectional_attention


class Gemma2DecoderLayer(PrePostNormLayer):
    attention_class: ClassVar[type[GroupedAttention]] = Gemma2Attention
    mlp_class = Gemma2MLP
    norm_class = ZeroCenteredRMSNorm


class Gemma2PreTrainedModel(NativeDecoder):
    config: Gemma2Config
    config_class = Gemma2Config
    _supports_sdpa = False  # which has no softcap
    _no_split_modules = ["Gemma2DecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": Gemma2DecoderLayer, "attentions": Gemma2Attention}  # noqa: RUF012


class Gemma2Model(ScaledBackbone, Gemma2PreTrainedModel):
    layer_class = Gemma2DecoderLayer


class Gemma2ForCausalLM(SoftcappedCausalLMHead, Gemma2PreTrainedModel, GenerationMixin):
    backbone_class = Gemma2Model


class Gemma2ForSequenceClassification(SequenceClassificationHead, Gemma2PreTrainedModel):
    backbone_class = Gemma2Model


class Gemma2ForTokenClassification(TokenClassificationHead, Gemma2PreTrainedModel):
    backbone_class = Gemma2Model
