"""Qwen 2 MoE and Qwen 1.5 MoE: Qwen 2's decoder with experts and a gated shared expert."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, Qwen2MoeConfig
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.utils.output_capturing import OutputRecorder

from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.experts import Experts
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.heads import QuestionAnsweringHead, SequenceClassificationHead, TokenClassificationHead
from easytorch.layers.linear import linear
from easytorch.layers.masks import types_of_config
from easytorch.layers.mlp import GatedMLP
from easytorch.layers.moe_heads import BalancedCausalLMHead
from easytorch.layers.routers import SoftmaxRouter
from easytorch.layers.sparse_moe import SparseMoe
from easytorch.protocol.native import NativeMoeDecoder


class Qwen2MoeMLP(GatedMLP):
    def __init__(self, config: PreTrainedConfig, intermediate_size: int) -> None:
        super().__init__(config.hidden_size, intermediate_size, config.hidden_act)


class Qwen2MoeAttention(GroupedAttention):
    types_of_layers = staticmethod(types_of_config)

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx, bias=config.qkv_bias, out_bias=False)


class Qwen2MoeExperts(Experts):
    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config, config.num_experts, config.moe_intermediate_size)


class Qwen2MoeTopKRouter(SoftmaxRouter):
    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config, config.num_experts, normalized=config.norm_topk_prob, rounded=True)


class Qwen2MoeSparseMoeBlock(SparseMoe):
    router_class = Qwen2MoeTopKRouter
    experts_class = Qwen2MoeExperts

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.shared_expert = Qwen2MoeMLP(config, config.shared_expert_intermediate_size)
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        shared = linear(self.shared_expert_gate, hidden_states).sigmoid() * self.shared_expert(hidden_states)
        return super().forward(hidden_states) + shared


class Qwen2MoeDecoderLayer(DecoderLayer):
    """With experts in every `decoder_sparse_step`-th layer, but for those that `mlp_only_layers` names."""

    attention_class: ClassVar[type[nn.Module]] = Qwen2MoeAttention
    moe_class: ClassVar[type[SparseMoe]] = Qwen2MoeSparseMoeBlock

    def new_mlp(self, config: Any, layer_idx: int) -> nn.Module:
        sparse = config.num_experts > 0 and (layer_idx + 1) % config.decoder_sparse_step == 0
        if sparse and layer_idx not in config.mlp_only_layers:
            return self.moe_class(config)
        return Qwen2MoeMLP(config, config.intermediate_size)


class Qwen2MoePreTrainedModel(NativeMoeDecoder):
    config: Qwen2MoeConfig
    config_class = Qwen2MoeConfig
    _no_split_modules = ["Qwen2MoeDecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {  # noqa: RUF012
        "router_logits": OutputRecorder(Qwen2MoeTopKRouter, index=0),
        "hidden_states": Qwen2MoeDecoderLayer,
        "attentions": Qwen2MoeAttention,
    }


class Qwen2MoeModel(DecoderBackbone, Qwen2MoePreTrainedModel):
    layer_class = Qwen2MoeDecoderLayer
    output_class = MoeModelOutputWithPast


class Qwen2MoeForCausalLM(BalancedCausalLMHead, Qwen2MoePreTrainedModel, GenerationMixin):
    backbone_class = Qwen2MoeModel


class Qwen2MoeForSequenceClassification(SequenceClassificationHead, Qwen2MoePreTrainedModel):
    backbone_class = Qwen2MoeModel


class Qwen2MoeForTokenClassification(TokenClassificationHead, Qwen2MoePreTrainedModel):
    backbone_class = Qwen2MoeModel


class Qwen2MoeForQuestionAnswering(QuestionAnsweringHead, Qwen2MoePreTrainedModel):
    backbone_class = Qwen2MoeModel
