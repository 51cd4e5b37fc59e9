"""Qwen3.5 MoE: Qwen3.5's tower of images and videos, and its language model with experts."""

from __future__ import annotations

from transformers import GenerationMixin, Qwen3_5MoeConfig, Qwen3_5MoeVisionConfig
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from easytorch.layers.moe_heads import BalancedCausalLMHead
from easytorch.layers.tower_outputs import with_towers
from easytorch.layers.video_text import VIDEO_TEXT_INPUTS, VideoTextHead, head_arguments
from easytorch.models.qwen3_5 import Qwen3_5Model, Qwen3_5PreTrainedModel, Qwen3_5VisionBlock, Qwen3_5VisionModel
from easytorch.models.qwen3_5_moe_text import Qwen3_5MoePreTrainedModel as Qwen3_5MoeTextPreTrainedModel
from easytorch.models.qwen3_5_moe_text import Qwen3_5MoeTextModel
from easytorch.models.qwen3_vl import Qwen3VLVisionAttention
from easytorch.protocol.native import NativeMoeDecoder


class Qwen3_5MoeVisionBlock(Qwen3_5VisionBlock):
    pass


class Qwen3_5MoePreTrainedModel(Qwen3_5PreTrainedModel, NativeMoeDecoder):
    config: Qwen3_5MoeConfig
    config_class = Qwen3_5MoeConfig
    _no_split_modules = ["Qwen3_5MoeDecoderLayer", "Qwen3_5MoeVisionBlock"]  # noqa: RUF012
    _can_record_outputs = Qwen3_5MoeTextPreTrainedModel._can_record_outputs


class Qwen3_5MoeVisionModel(Qwen3_5VisionModel):
    config: Qwen3_5MoeVisionConfig
    config_class = Qwen3_5MoeVisionConfig
    block_class = Qwen3_5MoeVisionBlock
    _no_split_modules = ["Qwen3_5MoeVisionBlock"]  # noqa: RUF012

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """As transformers answers for the tower, whose config names what the decoder's does."""
        return True

    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": Qwen3_5MoeVisionBlock,
        "attentions": Qwen3VLVisionAttention,
    }


class Qwen3_5MoeModel(Qwen3_5Model, Qwen3_5MoePreTrainedModel):
    config: Qwen3_5MoeConfig
    config_class = Qwen3_5MoeConfig
    _no_split_modules = Qwen3_5MoePreTrainedModel._no_split_modules
    _can_record_outputs = Qwen3_5MoePreTrainedModel._can_record_outputs
    tower_class = Qwen3_5MoeVisionModel
    decoder_class = Qwen3_5MoeTextModel


class Qwen3_5MoeForConditionalGeneration(
    VideoTextHead, BalancedCausalLMHead, Qwen3_5MoePreTrainedModel, GenerationMixin
):
    backbone_class = Qwen3_5MoeModel
    output_class = with_towers(MoeCausalLMOutputWithPast, "qwen3_5_moe")
    accepts_loss_kwargs = False
    _fsdp_plan = BalancedCausalLMHead._fsdp_plan
    arguments = head_arguments(*VIDEO_TEXT_INPUTS, "output_router_logits")
