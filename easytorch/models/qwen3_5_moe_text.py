"""Qwen3.5 MoE's language model: Qwen3.5 with experts and a shared expert in every layer."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import GenerationMixin, Qwen3_5MoeTextConfig
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.utils.output_capturing import OutputRecorder

from easytorch.layers.gated_delta_net import GatedDeltaNet
from easytorch.layers.moe_heads import BalancedCausalLMHead
from easytorch.layers.routers import SoftmaxRouter
from easytorch.models.qwen2_moe import Qwen2MoeSparseMoeBlock
from easytorch.models.qwen3_5_text import Qwen3_5Backbone, Qwen3_5DecoderLayer
from easytorch.models.qwen3_next import Qwen3NextAttention
from easytorch.protocol.native import NativeMoeDecoder


class Qwen3_5MoeTopKRouter(SoftmaxRouter):
    def __init__(self, config: Any) -> None:
        super().__init__(config, config.num_experts, normalized=True, rounded=True)


class Qwen3_5MoeSparseMoeBlock(Qwen2MoeSparseMoeBlock):
    router_class = Qwen3_5MoeTopKRouter


class Qwen3_5MoeDecoderLayer(Qwen3_5DecoderLayer):
    mlp_class = Qwen3_5MoeSparseMoeBlock


class Qwen3_5MoePreTrainedModel(NativeMoeDecoder):
    config: Qwen3_5MoeTextConfig
    config_class = Qwen3_5MoeTextConfig
    _no_split_modules = ["Qwen3_5MoeDecoderLayer", "Qwen3_5MoeVisionBlock"]  # noqa: RUF012
    _can_record_outputs = {  # noqa: RUF012
        "router_logits": OutputRecorder(Qwen3_5MoeTopKRouter, index=0),
        "hidden_states": Qwen3_5MoeDecoderLayer,
        "attentions": Qwen3NextAttention,
    }
    _is_stateful = True
    # layers of multi-token prediction, and the vision tower
    _keys_to_ignore_on_load_unexpected = [r"^mtp.*", r"^model.visual.*"]  # noqa: RUF012

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, GatedDeltaNet):
            module.reset_parameters()


class Qwen3_5MoeTextModel(Qwen3_5Backbone, Qwen3_5MoePreTrainedModel):
    layer_class = Qwen3_5MoeDecoderLayer
    output_class = MoeModelOutputWithPast


class Qwen3_5MoeForCausalLM(BalancedCausalLMHead, Qwen3_5MoePreTrainedModel, GenerationMixin):
    backbone_class = Qwen3_5MoeTextModel
