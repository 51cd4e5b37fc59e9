"""DeepSeek V2 (arXiv:2405.04434): latent attention, and experts chosen by a softmax, if set within groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import DeepseekV2Config, GenerationMixin, PreTrainedConfig
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.utils.output_capturing import OutputRecorder

from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.heads import SequenceClassificationHead
from easytorch.layers.kept_in_float32 import kept_in_float32
from easytorch.layers.latent_attention import LatentAttention
from easytorch.layers.mlp import GatedMLP
from easytorch.layers.moe_heads import MoeCausalLMHead
from easytorch.layers.rotary import Float32RotaryEmbedding, rotary
from easytorch.layers.routers import GroupedSoftmaxRouter
from easytorch.layers.stock_names import given_by
from easytorch.models.glm4_moe import Glm4MoeExperts, Glm4MoeMoE
from easytorch.protocol.native import NativeMoeDecoder


class DeepseekV2MLP(GatedMLP):
    def __init__(self, config: PreTrainedConfig, intermediate_size: int) -> None:
        super().__init__(config.hidden_size, intermediate_size, config.hidden_act, bias=config.mlp_bias)


class DeepseekV2Attention(LatentAttention):
    def rotate(
        self, query: torch.Tensor, key: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rotary(query, key, *position_embeddings, interleaved=True)


class DeepseekV2TopkRouter(GroupedSoftmaxRouter):
    topk_method = given_by("config.topk_method")

    def __init__(self, config: Any) -> None:
        methods = {"greedy": (1, 1), "group_limited_greedy": (config.n_group, config.topk_group)}
        if config.topk_method not in methods:
            raise ValueError(
                f"deepseek_v2: config.topk_method={config.topk_method!r}; this family has {', '.join(methods)}"
            )
        groups, taken = methods[config.topk_method]
        super().__init__(config, config.n_routed_experts, groups, taken)


class DeepseekV2Moe(Glm4MoeMoE):
    router_class = DeepseekV2TopkRouter
    experts_class = Glm4MoeExperts
    mlp_class = DeepseekV2MLP


class DeepseekV2DecoderLayer(DecoderLayer):
    """The first `first_k_dense_replace` layers have no experts."""

    attention_class = DeepseekV2Attention

    def new_mlp(self, config: Any, layer_idx: int) -> nn.Module:
        dense = layer_idx < config.first_k_dense_replace
        return DeepseekV2MLP(config, config.intermediate_size) if dense else DeepseekV2Moe(config)


class DeepseekV2PreTrainedModel(NativeMoeDecoder):
    config: DeepseekV2Config
    config_class = DeepseekV2Config
    _no_split_modules = ["DeepseekV2DecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": DeepseekV2DecoderLayer,
        "attentions": DeepseekV2Attention,
        "router_logits": OutputRecorder(DeepseekV2TopkRouter, index=0),
    }
    _keep_in_fp32_modules_strict = kept_in_float32("DeepseekV2PreTrainedModel")


class DeepseekV2Model(DecoderBackbone, DeepseekV2PreTrainedModel):
    layer_class = DeepseekV2DecoderLayer
    output_class = MoeModelOutputWithPast
    rotary_class = Float32RotaryEmbedding


class DeepseekV2ForCausalLM(MoeCausalLMHead, DeepseekV2PreTrainedModel, GenerationMixin):
    backbone_class = DeepseekV2Model


class DeepseekV2ForSequenceClassification(SequenceClassificationHead, DeepseekV2PreTrainedModel):
    backbone_class = DeepseekV2Model
