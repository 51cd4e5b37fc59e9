"""Qwen3.5: its language model over images and videos, by Qwen3-VL's tower without features of its layers."""

from __future__ import annotations

from torch import nn
from transformers import GenerationMixin, Qwen3_5Config, Qwen3_5VisionConfig

from easytorch.layers.arguments import ArgumentsInOrder
from easytorch.layers.gated_delta_net import GatedDeltaNet
from easytorch.layers.heads import SequenceClassificationHead, TokenClassificationHead
from easytorch.layers.video_text import (
    VIDEO_TEXT_INPUTS,
    VideoTextHead,
    VideoTextModel,
    head_arguments,
    model_arguments,
)
from easytorch.models.qwen3_5_text import Qwen3_5DecoderLayer, Qwen3_5TextModel
from easytorch.models.qwen3_next import Qwen3NextAttention
from easytorch.models.qwen3_vl import Qwen3VLVisionAttention, Qwen3VLVisionBlock, Qwen3VLVisionModel
from easytorch.protocol.native import NativeVideoText


class Qwen3_5VisionBlock(Qwen3VLVisionBlock):
    pass


class Qwen3_5PreTrainedModel(NativeVideoText):
    config: Qwen3_5Config
    config_class = Qwen3_5Config
    _no_split_modules = ["Qwen3_5DecoderLayer", "Qwen3_5VisionBlock"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": Qwen3_5DecoderLayer, "attentions": Qwen3NextAttention}  # noqa: RUF012
    _is_stateful = True
    _keys_to_ignore_on_load_unexpected = [r"^mtp.*"]  # noqa: RUF012 - layers of multi-token prediction

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, GatedDeltaNet):
            module.reset_parameters()


class Qwen3_5VisionModel(Qwen3VLVisionModel):
    config: Qwen3_5VisionConfig
    config_class = Qwen3_5VisionConfig
    block_class = Qwen3_5VisionBlock
    _no_split_modules = ["Qwen3_5VisionBlock"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": Qwen3_5VisionBlock, "attentions": Qwen3VLVisionAttention}  # noqa: RUF012


class Qwen3_5Model(VideoTextModel, Qwen3_5PreTrainedModel):
    tower_class = Qwen3_5VisionModel
    decoder_class = Qwen3_5TextModel
    either_input = True
    frames_apart = True
    arguments = model_arguments("use_cache", *VIDEO_TEXT_INPUTS)


class Qwen3_5ForConditionalGeneration(VideoTextHead, Qwen3_5PreTrainedModel, GenerationMixin):
    backbone_class = Qwen3_5Model
    accepts_loss_kwargs = False
    arguments = head_arguments(*VIDEO_TEXT_INPUTS)


class Qwen3_5ForSequenceClassification(ArgumentsInOrder, SequenceClassificationHead, Qwen3_5PreTrainedModel):
    backbone_class = Qwen3_5Model
    input_modalities = "text"
    arguments = model_arguments(*VIDEO_TEXT_INPUTS)[:-1]


class Qwen3_5ForTokenClassification(TokenClassificationHead, Qwen3_5PreTrainedModel):
    backbone_class = Qwen3_5Model
    input_modalities = "text"
