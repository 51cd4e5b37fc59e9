"""OLMo 3 (arXiv:2512.13961): OLMo 2's decoder with windows in most layers, and rotary positions by type of layer."""

from __future__ import annotations

import torch
from transformers import GenerationMixin, Olmo3Config

from easytorch.layers.decoder import DecoderBackbone
from easytorch.layers.heads import CausalLMHead, SequenceClassificationHead
from easytorch.layers.masks import types_of_config
from easytorch.layers.rotary import LayerTypeRotaryEmbedding
from easytorch.layers.stock_names import given_by
from easytorch.models.olmo2 import Olmo2Attention, Olmo2DecoderLayer
from easytorch.protocol.native import NativeDecoder


class Olmo3RotaryEmbedding(LayerTypeRotaryEmbedding):
    table_dtype = torch.float32


class Olmo3Attention(Olmo2Attention):
    attention_type = given_by("layer_type")
    types_of_layers = staticmethod(types_of_config)


class Olmo3DecoderLayer(Olmo2DecoderLayer):
    attention_class = Olmo3Attention


class Olmo3PreTrainedModel(NativeDecoder):
    config: Olmo3Config
    config_class = Olmo3Config
    _no_split_modules = ["Olmo3DecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": Olmo3DecoderLayer, "attentions": Olmo3Attention}  # noqa: RUF012


class Olmo3Model(DecoderBackbone, Olmo3PreTrainedModel):
    layer_class = Olmo3DecoderLayer
    rotary_class = Olmo3RotaryEmbedding


class Olmo3ForCausalLM(CausalLMHead, Olmo3PreTrainedModel, GenerationMixin):
    backbone_class = Olmo3Model


class Olmo3ForSequenceClassification(SequenceClassificationHead, Olmo3PreTrainedModel):
    backbone_class = Olmo3Model
