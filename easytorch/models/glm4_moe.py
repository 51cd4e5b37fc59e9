"""GLM 4.5 (arXiv:2508.06471): DeepSeek V3's experts, and attention with partial rotary positions."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import GenerationMixin, Glm4MoeConfig, PreTrainedConfig
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.utils.output_capturing import OutputRecorder

from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.experts import Experts
from easytorch.layers.grouped_attention import GroupedAttention
from easytorch.layers.kept_in_float32 import kept_in_float32
from easytorch.layers.mlp import GatedMLP
from easytorch.layers.moe_heads import MoeCausalLMHead
from easytorch.layers.norm import RMSNorm
from easytorch.layers.rotary import PartialRotaryEmbedding
from easytorch.layers.routers import GroupedSigmoidRouter
from easytorch.layers.sparse_moe import SparseMoe
from easytorch.protocol.native import NativeMoeDecoder


class Glm4MoeMLP(GatedMLP):
    def __init__(self, config: PreTrainedConfig, intermediate_size: int) -> None:
        super().__init__(config.hidden_size, intermediate_size, config.hidden_act)


class Glm4MoeAttention(GroupedAttention):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx, out_bias=False)
        self.use_qk_norm = config.use_qk_norm
        if self.use_qk_norm:
            self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def rotate(self, query: torch.Tensor, key: torch.Tensor, *positions: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if self.use_qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        return super().rotate(query, key, *positions)


class Glm4MoeExperts(Experts):
    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config, config.n_routed_experts, config.moe_intermediate_size)


class Glm4MoeTopkRouter(GroupedSigmoidRouter):
    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config, config.n_routed_experts)


class Glm4MoeMoE(SparseMoe):
    order = ("experts", "gate")
    router_class: ClassVar[type[Any]] = Glm4MoeTopkRouter
    experts_class: ClassVar[type[Any]] = Glm4MoeExperts
    mlp_class: ClassVar[type[nn.Module]] = Glm4MoeMLP

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.shared_experts = self.mlp_class(config, config.moe_intermediate_size * config.n_shared_experts)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) + self.shared_experts(hidden_states)


class Glm4MoeDecoderLayer(DecoderLayer):
    """The first `first_k_dense_replace` layers have no experts."""

    attention_class: ClassVar[type[nn.Module]] = Glm4MoeAttention

    def new_mlp(self, config: Any, layer_idx: int) -> nn.Module:
        dense = layer_idx < config.first_k_dense_replace
        return Glm4MoeMLP(config, config.intermediate_size) if dense else Glm4MoeMoE(config)


class Glm4MoePreTrainedModel(NativeMoeDecoder):
    config: Glm4MoeConfig
    config_class = Glm4MoeConfig
    _no_split_modules = ["Glm4MoeDecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": Glm4MoeDecoderLayer,
        "attentions": Glm4MoeAttention,
        "router_logits": OutputRecorder(Glm4MoeTopkRouter, index=0),
    }
    _keep_in_fp32_modules_strict = kept_in_float32("Glm4MoePreTrainedModel")
    # the layers of multi-token prediction, which come after those of the model: of GLM 4.5 and of GLM 4.5 Air
    _keys_to_ignore_on_load_unexpected = [r"model\.layers\.92.*", r"model\.layers\.46.*"]  # noqa: RUF012


class Glm4MoeModel(DecoderBackbone, Glm4MoePreTrainedModel):
    layer_class = Glm4MoeDecoderLayer
    output_class = MoeModelOutputWithPast
    rotary_class = PartialRotaryEmbedding


class Glm4MoeForCausalLM(MoeCausalLMHead, Glm4MoePreTrainedModel, GenerationMixin):
    backbone_class = Glm4MoeModel
