"""Qwen3-VL MoE (arXiv:2511.21631): Qwen3-VL whose decoder has Qwen 3's experts."""

from __future__ import annotations

from typing import Any

from transformers import GenerationMixin, Qwen3VLMoeConfig, Qwen3VLMoeTextConfig, Qwen3VLMoeVisionConfig
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.utils.output_capturing import OutputRecorder

from easytorch.layers.decoder import DecoderBackbone
from easytorch.layers.moe_heads import BalancedCausalLMHead
from easytorch.layers.multimodal_positions import MultimodalPositions
from easytorch.layers.routers import SoftmaxRouter
from easytorch.layers.tower_outputs import with_towers
from easytorch.layers.video_text import VIDEO_TEXT_INPUTS, VideoTextHead, head_arguments
from easytorch.models.qwen2_moe import Qwen2MoeDecoderLayer
from easytorch.models.qwen3_moe import Qwen3MoeSparseMoeBlock
from easytorch.models.qwen3_vl import (
    Qwen3VLModel,
    Qwen3VLTextAttention,
    Qwen3VLTextDecoderLayer,
    Qwen3VLTextRotaryEmbedding,
    Qwen3VLVisionAttention,
    Qwen3VLVisionBlock,
    Qwen3VLVisionModel,
)
from easytorch.protocol.native import NativeMoeDecoder, NativeVideoText


class Qwen3VLMoeVisionBlock(Qwen3VLVisionBlock):
    pass


class Qwen3VLMoeTextTopKRouter(SoftmaxRouter):
    def __init__(self, config: Any) -> None:
        super().__init__(config, config.num_experts, normalized=True, rounded=True)


class Qwen3VLMoeTextSparseMoeBlock(Qwen3MoeSparseMoeBlock):
    router_class = Qwen3VLMoeTextTopKRouter


class Qwen3VLMoeTextDecoderLayer(Qwen3VLTextDecoderLayer, Qwen2MoeDecoderLayer):
    attention_class = Qwen3VLTextAttention
    moe_class = Qwen3VLMoeTextSparseMoeBlock


class Qwen3VLMoePreTrainedModel(NativeVideoText, NativeMoeDecoder):
    config: Qwen3VLMoeConfig
    config_class = Qwen3VLMoeConfig
    input_modalities = ("text", "image", "video")
    _no_split_modules = ["Qwen3VLMoeTextDecoderLayer", "Qwen3VLMoeVisionBlock"]  # noqa: RUF012
    _can_record_outputs = {  # noqa: RUF012
        "router_logits": OutputRecorder(Qwen3VLMoeTextTopKRouter, index=0),
        "hidden_states": Qwen3VLMoeTextDecoderLayer,
        "attentions": Qwen3VLTextAttention,
    }


class Qwen3VLMoeVisionModel(Qwen3VLVisionModel):
    config: Qwen3VLMoeVisionConfig
    config_class = Qwen3VLMoeVisionConfig
    block_class = Qwen3VLMoeVisionBlock
    _no_split_modules = Qwen3VLMoePreTrainedModel._no_split_modules

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """As transformers answers for the tower, whose config names what the decoder's does."""
        return True

    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": Qwen3VLMoeVisionBlock,
        "attentions": Qwen3VLVisionAttention,
    }


class Qwen3VLMoeTextModel(MultimodalPositions, DecoderBackbone, Qwen3VLMoePreTrainedModel):
    config: Qwen3VLMoeTextConfig
    config_class = Qwen3VLMoeTextConfig
    input_modalities = ("text",)
    layer_class = Qwen3VLMoeTextDecoderLayer
    rotary_class = Qwen3VLTextRotaryEmbedding
    output_class = MoeModelOutputWithPast


class Qwen3VLMoeModel(Qwen3VLModel, Qwen3VLMoePreTrainedModel):
    config: Qwen3VLMoeConfig
    config_class = Qwen3VLMoeConfig
    input_modalities = Qwen3VLMoePreTrainedModel.input_modalities
    _no_split_modules = Qwen3VLMoePreTrainedModel._no_split_modules
    _can_record_outputs = Qwen3VLMoePreTrainedModel._can_record_outputs
    tower_class = Qwen3VLMoeVisionModel
    decoder_class = Qwen3VLMoeTextModel


class Qwen3VLMoeForConditionalGeneration(
    VideoTextHead, BalancedCausalLMHead, Qwen3VLMoePreTrainedModel, GenerationMixin
):
    backbone_class = Qwen3VLMoeModel
    output_class = with_towers(MoeCausalLMOutputWithPast, "qwen3_vl_moe")
    accepts_loss_kwargs = False
    arguments = head_arguments(*VIDEO_TEXT_INPUTS, "output_router_logits")
