"""MiniMax M2: experts chosen by a sigmoid and a bias, and norms of queries and keys across all heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, MiniMaxM2Config, PreTrainedConfig, initialization
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.utils.output_capturing import OutputRecorder

from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.experts import Experts
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.moe_heads import BalancedCausalLMHead
from easytorch.layers.norm import RMSNorm
from easytorch.layers.rotary import PartialRotaryEmbedding
from easytorch.layers.routers import Routed, Router
from easytorch.models.mixtral import MixtralSparseMoeBlock
from easytorch.protocol.native import NativeMoeDecoder


class MiniMaxM2Attention(GroupedAttention):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx, bias=False)
        self.q_norm = RMSNorm(self.num_heads * self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.num_key_value_heads * self.head_dim, config.rms_norm_eps)

    def rotate(self, query: torch.Tensor, key: torch.Tensor, *positions: Any) -> tuple[torch.Tensor, torch.Tensor]:
        query, key = self.q_norm(query.flatten(2)).view_as(query), self.k_norm(key.flatten(2)).view_as(key)
        return super().rotate(query, key, *positions)


class MiniMaxM2Experts(Experts):
    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config, config.num_local_experts, config.intermediate_size)


class MiniMaxM2TopKRouter(Router):
    """sigmoid(logits), chosen with the bias of the block and normalized without it."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config, config.num_local_experts)

    def forward(self, hidden_states: torch.Tensor, e_score_correction_bias: torch.Tensor) -> Routed:  # type: ignore[override]
        logits = self.logits(hidden_states.reshape(-1, hidden_states.shape[-1]).to(self.weight.dtype))
        scores = logits.float().sigmoid()
        indices = (scores + e_score_correction_bias).topk(self.top_k, dim=-1, sorted=False)[1]
        weights = scores.gather(1, indices)
        return logits, weights / weights.sum(dim=-1, keepdim=True), indices


class MiniMaxM2SparseMoeBlock(MixtralSparseMoeBlock):
    router_class = MiniMaxM2TopKRouter
    experts_class = MiniMaxM2Experts

    e_score_correction_bias: torch.Tensor

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_local_experts))

    def route(self, hidden_states: torch.Tensor) -> Routed:
        return self.gate(hidden_states, self.e_score_correction_bias)


class MiniMaxM2DecoderLayer(DecoderLayer):
    attention_class = MiniMaxM2Attention
    mlp_class = MiniMaxM2SparseMoeBlock


class MiniMaxM2PreTrainedModel(NativeMoeDecoder):
    config: MiniMaxM2Config
    config_class = MiniMaxM2Config
    _no_split_modules = ["MiniMaxM2DecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {  # noqa: RUF012
        "router_logits": OutputRecorder(MiniMaxM2TopKRouter, index=0),
        "hidden_states": MiniMaxM2DecoderLayer,
        "attentions": MiniMaxM2Attention,
    }

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, MiniMaxM2SparseMoeBlock):
            initialization.zeros_(module.e_score_correction_bias)


class MiniMaxM2Model(DecoderBackbone, MiniMaxM2PreTrainedModel):
    layer_class = MiniMaxM2DecoderLayer
    output_class = MoeModelOutputWithPast
    rotary_class = PartialRotaryEmbedding


class MiniMaxM2ForCausalLM(BalancedCausalLMHead, MiniMaxM2PreTrainedModel, GenerationMixin):
    backbone_class = MiniMaxM2Model
