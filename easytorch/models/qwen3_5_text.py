"""Qwen3.5's language model: Qwen3-Next without experts, with three-dimensional positions where there are images."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, Qwen3_5TextConfig

from easytorch.layers.gated_delta_net import GatedDeltaNet
from easytorch.layers.heads import CausalLMHead, SequenceClassificationHead
from easytorch.layers.hybrid import HybridBackbone, HybridLayer
from easytorch.layers.linear import linear
from easytorch.layers.multimodal_positions import MultimodalPositions, MultimodalRotaryEmbedding
from easytorch.layers.norm import ZeroCenteredRMSNorm
from easytorch.layers.rotary import PartialRotaryEmbedding
from easytorch.models.mistral import MistralMLP
from easytorch.models.qwen3_next import Qwen3NextAttention
from easytorch.protocol.native import NativeDecoder


class Qwen3_5GatedDeltaNet(GatedDeltaNet):
    def add_modules(self, config: Any) -> None:
        super().add_modules(config)
        hidden = config.hidden_size
        self.in_proj_qkv = nn.Linear(hidden, sum(self.convolved), bias=False)
        self.in_proj_z = nn.Linear(hidden, self.value_heads * self.value_width, bias=False)
        self.in_proj_b = nn.Linear(hidden, self.value_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, self.value_heads, bias=False)

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gate = linear(self.in_proj_z, hidden_states).unflatten(-1, (self.value_heads, -1))
        b, a = linear(self.in_proj_b, hidden_states), linear(self.in_proj_a, hidden_states)
        return linear(self.in_proj_qkv, hidden_states), gate, b, a


class Qwen3_5DecoderLayer(HybridLayer):
    attention_class = Qwen3NextAttention
    linear_class = Qwen3_5GatedDeltaNet
    mlp_class = MistralMLP
    norm_class = ZeroCenteredRMSNorm


class Qwen3_5TextRotaryEmbedding(MultimodalRotaryEmbedding, PartialRotaryEmbedding):
    default_section = (11, 11, 10)
    mrope_interleaved = True


class Qwen3_5Backbone(MultimodalPositions, HybridBackbone):
    rotary_class = Qwen3_5TextRotaryEmbedding


class Qwen3_5PreTrainedModel(NativeDecoder):
    config: Qwen3_5TextConfig
    config_class = Qwen3_5TextConfig
    _no_split_modules = ["Qwen3_5DecoderLayer", "Qwen3_5VisionBlock"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": Qwen3_5DecoderLayer, "attentions": Qwen3NextAttention}  # noqa: RUF012
    _is_stateful = True
    # layers of multi-token prediction, and the vision tower
    _keys_to_ignore_on_load_unexpected = [r"^mtp.*", r"^model.visual.*"]  # noqa: RUF012

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, GatedDeltaNet):
            module.reset_parameters()


class Qwen3_5TextModel(Qwen3_5Backbone, Qwen3_5PreTrainedModel):
    layer_class = Qwen3_5DecoderLayer


class Qwen3_5ForCausalLM(CausalLMHead, Qwen3_5PreTrainedModel, GenerationMixin):
    backbone_class = Qwen3_5TextModel


class Qwen3_5TextForSequenceClassification(SequenceClassificationHead, Qwen3_5PreTrainedModel):
    backbone_class = Qwen3_5TextModel
