"""ERNIE 4.5: Llama's decoder with interleaved rotary pairs, rotated in float32."""

from __future__ import annotations

from typing import Any

from transformers import Ernie4_5Config, GenerationMixin

from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.heads import CausalLMHead
from easytorch.layers.mlp import GatedMLP
from easytorch.layers.rotary import Float32RotaryEmbedding
from easytorch.protocol.native import NativeDecoder


class Ernie4_5MLP(GatedMLP):
    def __init__(self, config: Any) -> None:
        super().__init__(config.hidden_size, config.intermediate_size, config.hidden_act, bias=config.use_bias)


class Ernie4_5Attention(GroupedAttention):
    interleaved = True

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx, bias=config.use_bias)


class Ernie4_5DecoderLayer(DecoderLayer):
    attention_class = Ernie4_5Attention
    mlp_class = Ernie4_5MLP


class Ernie4_5PreTrainedModel(NativeDecoder):
    config: Ernie4_5Config
    config_class = Ernie4_5Config
    _no_split_modules = ["Ernie4_5DecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": Ernie4_5DecoderLayer, "attentions": Ernie4_5Attention}  # noqa: RUF012


class Ernie4_5Model(DecoderBackbone, Ernie4_5PreTrainedModel):
    layer_class = Ernie4_5DecoderLayer
    rotary_class = Float32RotaryEmbedding


class Ernie4_5ForCausalLM(CausalLMHead, Ernie4_5PreTrainedModel, GenerationMixin):
    backbone_class = Ernie4_5Model
