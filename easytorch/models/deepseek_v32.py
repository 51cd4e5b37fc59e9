"""DeepSeek V3.2: V3's decoder, whose latent attention sees the tokens that a small indexer chooses."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import DeepseekV32Config, GenerationMixin
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.utils.output_capturing import OutputRecorder

from easytorch.layers.decoder import DecoderBackbone
from easytorch.layers.kept_in_float32 import kept_in_float32
from easytorch.layers.moe_heads import MoeCausalLMHead
from easytorch.layers.sparse_indexer import MASKS_OF_INDEXED, SparseLatentAttention
from easytorch.models.deepseek_v3 import apart
from easytorch.models.glm4_moe import Glm4MoeDecoderLayer, Glm4MoeMLP, Glm4MoeMoE, Glm4MoeTopkRouter
from easytorch.protocol.native import NativeMoeDecoder


class DeepseekV32Attention(SparseLatentAttention):
    def rotate(
        self, query: torch.Tensor, key: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().rotate(apart(query), apart(key), position_embeddings)


class DeepseekV32DecoderLayer(Glm4MoeDecoderLayer):
    """With experts where `mlp_layer_types` says "sparse"."""

    attention_class = DeepseekV32Attention

    def new_mlp(self, config: Any, layer_idx: int) -> nn.Module:
        kind = config.mlp_layer_types[layer_idx]
        if kind not in ("dense", "sparse"):
            raise ValueError(f"{config.model_type}: config.mlp_layer_types names {kind!r}; known: dense, sparse")
        return Glm4MoeMoE(config) if kind == "sparse" else Glm4MoeMLP(config, config.intermediate_size)


class DeepseekV32PreTrainedModel(NativeMoeDecoder):
    config: DeepseekV32Config
    config_class = DeepseekV32Config
    least_counts = {"index_topk": 1, "index_head_dim": 1, "index_n_heads": 1}  # noqa: RUF012
    _supports_flex_attn = False
    _no_split_modules = ["DeepseekV32DecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": DeepseekV32DecoderLayer,
        "attentions": DeepseekV32Attention,
        "router_logits": OutputRecorder(Glm4MoeTopkRouter, index=0),
    }
    _keep_in_fp32_modules = ["indexer.weights_proj"]  # noqa: RUF012
    _keep_in_fp32_modules_strict = kept_in_float32("DeepseekV32PreTrainedModel")
    # the layer of multi-token prediction, which comes after those of the model
    _keys_to_ignore_on_load_unexpected = [r"model\.layers\.61.*"]  # noqa: RUF012


class DeepseekV32Model(DecoderBackbone, DeepseekV32PreTrainedModel):
    layer_class = DeepseekV32DecoderLayer
    masks_of = MASKS_OF_INDEXED
    output_class = MoeModelOutputWithPast

    def __init__(self, config: Any) -> None:
        if len(config.mlp_layer_types) < config.num_hidden_layers:
            raise ValueError(
                f"{config.model_type}: config.mlp_layer_types has {len(config.mlp_layer_types)} entries for "
                f"num_hidden_layers={config.num_hidden_layers}"
            )
        super().__init__(config)


class DeepseekV32ForCausalLM(MoeCausalLMHead, DeepseekV32PreTrainedModel, GenerationMixin):
    backbone_class = DeepseekV32Model
