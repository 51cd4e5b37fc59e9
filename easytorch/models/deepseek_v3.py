"""DeepSeek V3 (arXiv:2412.19437): latent attention, and experts chosen within groups by a sigmoid and a bias."""

from __future__ import annotations

import torch
from transformers import DeepseekV3Config, GenerationMixin
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.utils.output_capturing import OutputRecorder

from easytorch.layers.decoder import DecoderBackbone
from easytorch.layers.heads import SequenceClassificationHead, TokenClassificationHead
from easytorch.layers.kept_in_float32 import kept_in_float32
from easytorch.layers.latent_attention import LatentAttention
from easytorch.layers.moe_heads import MoeCausalLMHead
from easytorch.models.glm4_moe import Glm4MoeDecoderLayer, Glm4MoeTopkRouter
from easytorch.protocol.native import NativeMoeDecoder


class DeepseekV3Attention(LatentAttention):
    def rotate(
        self, query: torch.Tensor, key: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.config.rope_interleave:
            query, key = apart(query), apart(key)
        return super().rotate(query, key, position_embeddings)


def apart(x: torch.Tensor) -> torch.Tensor:
    """Interleaved pairs, moved half a head apart as transformers' class caches them."""
    return x.unflatten(-1, (-1, 2)).mT.flatten(-2)


class DeepseekV3DecoderLayer(Glm4MoeDecoderLayer):
    attention_class = DeepseekV3Attention


class DeepseekV3PreTrainedModel(NativeMoeDecoder):
    config: DeepseekV3Config
    config_class = DeepseekV3Config
    _no_split_modules = ["DeepseekV3DecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": DeepseekV3DecoderLayer,
        "attentions": DeepseekV3Attention,
        "router_logits": OutputRecorder(Glm4MoeTopkRouter, index=0),
    }
    _keep_in_fp32_modules_strict = kept_in_float32("DeepseekV3PreTrainedModel")
    # the layer of multi-token prediction, which comes after those of the model
    _keys_to_ignore_on_load_unexpected = [r"model\.layers\.61.*"]  # noqa: RUF012


class DeepseekV3Model(DecoderBackbone, DeepseekV3PreTrainedModel):
    layer_class = DeepseekV3DecoderLayer
    output_class = MoeModelOutputWithPast


class DeepseekV3ForCausalLM(MoeCausalLMHead, DeepseekV3PreTrainedModel, GenerationMixin):
    backbone_class = DeepseekV3Model


class DeepseekV3ForSequenceClassification(SequenceClassificationHead, DeepseekV3PreTrainedModel):
    backbone_class = DeepseekV3Model


class DeepseekV3ForTokenClassification(TokenClassificationHead, DeepseekV3PreTrainedModel):
    backbone_class = DeepseekV3Model
