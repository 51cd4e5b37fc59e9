"""Granite 3 MoE: Granite's decoder with experts, weighted by a softmax over those that are chosen."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, GraniteMoeConfig, PreTrainedConfig
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.utils.output_capturing import OutputRecorder

from easytorch.cache_names import CACHE
from easytorch.layers.arguments import ArgumentsInOrder
from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.experts import Experts
from easytorch.layers.moe_heads import BalancedCausalLMHead
from easytorch.layers.routers import Routed, TopKSoftmaxRouter
from easytorch.layers.sparse_moe import SparseMoe
from easytorch.layers.stock_names import given_by
from easytorch.models.granite import GraniteAttention
from easytorch.protocol.native import NativeMoeDecoder


class GraniteMoeAttention(GraniteAttention):
    pass


class GraniteMoeExperts(Experts):
    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config, config.num_local_experts, config.intermediate_size)


class GraniteMoeTopKRouter(TopKSoftmaxRouter):
    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config, config.num_local_experts)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().logits(hidden_states).float()

    def forward(self, hidden_states: torch.Tensor) -> Routed:
        """-> logits in float32, weights rounded to the dtype of the states, indices."""
        logits, weights, indices = super().forward(hidden_states)
        return logits, weights.to(hidden_states.dtype), indices


class GraniteMoeMoE(SparseMoe):
    input_size = given_by("config.hidden_size")
    order = ("router", "experts")
    router_class = GraniteMoeTopKRouter
    experts_class = GraniteMoeExperts


class GraniteMoeDecoderLayer(DecoderLayer):
    attention_class = GraniteMoeAttention
    mlp_class = GraniteMoeMoE
    mlp_name = "block_sparse_moe"
    block_sparse_moe: nn.Module

    def add_modules(self, config: Any, layer_idx: int) -> None:
        super().add_modules(config, layer_idx)
        self._modules["block_sparse_moe"] = self._modules.pop("block_sparse_moe")  # transformers has it after the norms
        self.residual_multiplier = config.residual_multiplier

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended * self.residual_multiplier
        mixed = self.block_sparse_moe(self.post_attention_layernorm(hidden_states))
        return hidden_states + mixed * self.residual_multiplier


class GraniteMoePreTrainedModel(NativeMoeDecoder):
    config: GraniteMoeConfig
    config_class = GraniteMoeConfig
    _no_split_modules = ["GraniteMoeDecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {  # noqa: RUF012
        "router_logits": OutputRecorder(GraniteMoeTopKRouter, index=0),
        "hidden_states": GraniteMoeDecoderLayer,
        "attentions": GraniteMoeAttention,
    }


class GraniteMoeModel(DecoderBackbone, GraniteMoePreTrainedModel):
    layer_class = GraniteMoeDecoderLayer
    output_class = MoeModelOutputWithPast

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embedding_multiplier = config.embedding_multiplier

    def enter(self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        scale = self.embedding_multiplier
        return inputs_embeds if scale is None else inputs_embeds * scale


class GraniteMoeHead(BalancedCausalLMHead, ArgumentsInOrder):
    arguments = (
        "input_ids", "attention_mask", "position_ids", CACHE, "inputs_embeds", "labels", "output_router_logits",
        "logits_to_keep", "use_cache",
    )  # fmt: skip


class GraniteMoeForCausalLM(GraniteMoeHead, GraniteMoePreTrainedModel, GenerationMixin):
    backbone_class = GraniteMoeModel

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.logits_scaling = config.logits_scaling

    def finish_logits(self, logits: torch.Tensor) -> torch.Tensor:
        scale = self.logits_scaling
        return logits if scale is None else logits / scale

    def logits_finish(self) -> tuple[float, float | None]:
        scale = self.logits_scaling
        return 1.0 if scale is None else 1.0 / scale, None
