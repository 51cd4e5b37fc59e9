"""OLMoE (arXiv:2409.02060): experts, and norms of queries and keys across all heads."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationMixin, OlmoeConfig, PreTrainedConfig
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.utils.output_capturing import OutputRecorder

from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.experts import Experts
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.moe_heads import BalancedCausalLMHead
from easytorch.layers.norm import RMSNorm
from easytorch.layers.routers import SoftmaxRouter
from easytorch.layers.sparse_moe import SparseMoe
from easytorch.protocol.native import NativeMoeDecoder


class OlmoeAttention(GroupedAttention):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.q_norm = RMSNorm(self.num_heads * self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.num_key_value_heads * self.head_dim, config.rms_norm_eps)

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value = super().project(hidden_states)
        query, key = self.q_norm(query.flatten(2)).view_as(query), self.k_norm(key.flatten(2)).view_as(key)
        bound = self.config.clip_qkv
        return (query, key, value) if bound is None else tuple(x.clamp(-bound, bound) for x in (query, key, value))


class OlmoeExperts(Experts):
    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config, config.num_experts, config.intermediate_size)


class OlmoeTopKRouter(SoftmaxRouter):
    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config, config.num_experts, normalized=config.norm_topk_prob, rounded=True)


class OlmoeSparseMoeBlock(SparseMoe):
    router_class = OlmoeTopKRouter
    experts_class = OlmoeExperts


class OlmoeDecoderLayer(DecoderLayer):
    attention_class = OlmoeAttention
    mlp_class = OlmoeSparseMoeBlock


class OlmoePreTrainedModel(NativeMoeDecoder):
    config: OlmoeConfig
    config_class = OlmoeConfig
    _no_split_modules = ["OlmoeDecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {  # noqa: RUF012
        "router_logits": OutputRecorder(OlmoeTopKRouter, index=0),
        "hidden_states": OlmoeDecoderLayer,
        "attentions": OlmoeAttention,
    }


class OlmoeModel(DecoderBackbone, OlmoePreTrainedModel):
    layer_class = OlmoeDecoderLayer
    output_class = MoeModelOutputWithPast


class OlmoeForCausalLM(BalancedCausalLMHead, OlmoePreTrainedModel, GenerationMixin):
    backbone_class = OlmoeModel
