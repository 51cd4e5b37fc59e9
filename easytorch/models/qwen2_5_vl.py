"""Qwen2.5-VL (arXiv:2502.13923): Qwen2-VL with window attention in the tower, and positions of videos in seconds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, Qwen2_5_VLConfig
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig, Qwen2_5_VLVisionConfig
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs
from transformers.vision_utils import (
    get_vision_attention_seqlens,
    get_vision_position_ids,
    get_vision_window_index,
)

from easytorch.layers.decoder import DecoderLayer
from easytorch.layers.mlp import GatedMLP
from easytorch.layers.norm import RMSNorm
from easytorch.layers.packed_tower import (
    PackedAttention,
    PackedBlock,
    PackedPatches,
    VisionRotaryEmbedding,
    segments_of,
)
from easytorch.layers.patches import pair
from easytorch.layers.stock_names import given_by, product_of
from easytorch.layers.video_text import (
    VIDEO_TEXT_INPUTS,
    VideoTextHead,
    VideoTextModel,
    head_arguments,
    model_arguments,
)
from easytorch.models.mistral import MistralMLP
from easytorch.models.qwen2 import Qwen2Attention
from easytorch.models.qwen2_vl import PatchMerger, Qwen2VLDecoder
from easytorch.protocol.native import NativeVideoText


class Qwen2_5_VLVisionAttention(PackedAttention):
    pass


class Qwen2_5_VLVisionBlock(PackedBlock):
    norm_class = RMSNorm
    attention_class = Qwen2_5_VLVisionAttention

    def __init__(self, config: Any) -> None:
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act, bias=True)
        super().__init__(config, config.hidden_size, mlp)


class Qwen2_5_VLPatchMerger(PatchMerger):
    norm_class = RMSNorm


class Qwen2_5_VLPreTrainedModel(NativeVideoText):
    config: Qwen2_5_VLConfig
    config_class = Qwen2_5_VLConfig
    _no_split_modules = ["Qwen2_5_VLDecoderLayer", "Qwen2_5_VLVisionBlock"]  # noqa: RUF012


class Qwen2_5_VisionTransformerPretrainedModel(Qwen2_5_VLPreTrainedModel):
    patch_size = given_by("config.patch_size")
    spatial_merge_unit = product_of("spatial_merge_size", "spatial_merge_size")
    config: Qwen2_5_VLVisionConfig
    config_class = Qwen2_5_VLVisionConfig
    _no_split_modules = ["Qwen2_5_VLVisionBlock"]  # noqa: RUF012
    _input_embed_layer = "patch_embed"
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": Qwen2_5_VLVisionBlock,
        "attentions": Qwen2_5_VLVisionAttention,
    }

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.spatial_merge_size = config.spatial_merge_size
        self.window_size, self.fullatt_block_indexes = config.window_size, config.fullatt_block_indexes
        self.patch_embed = PackedPatches(config, width)
        self.rotary_pos_emb = VisionRotaryEmbedding(config, width)
        self.blocks = nn.ModuleList(Qwen2_5_VLVisionBlock(config) for _ in range(config.depth))
        self.merger = Qwen2_5_VLPatchMerger(config.out_hidden_size, width, config.spatial_merge_size)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(self, hidden_states: torch.Tensor, grid_thw: torch.Tensor, **kwargs: Any) -> BaseModelOutputWithPooling:
        """hidden_states (N, values of a patch), grid_thw (I, 3) -> last_hidden_state (N, D), in the order of windows,
        and pooler_output (N / merge**2, the decoder's D), in that of images. Patches attend within their window, and in
        the layers `config.fullatt_block_indexes` within their frame."""
        merge = self.spatial_merge_size
        positions = get_vision_position_ids(grid_thw, merge, kwargs=kwargs)
        frames = segments_of(get_vision_attention_seqlens(grid_thw, self.config, kwargs=kwargs)[0])
        order, bounds = get_vision_window_index(
            grid_thw,
            spatial_merge_size=merge,
            window_size=self.window_size,
            patch_size=pair(self.config.patch_size)[0],
            kwargs=kwargs,
        )
        kwargs.pop("max_window_seqlen", None)  # comes with precomputed boundaries, and is not needed here
        windows, order = segments_of(bounds), order.to(hidden_states.device)
        hidden_states = _by_squares(self.patch_embed(hidden_states), order, merge)
        rotations = tuple(_by_squares(one, order, merge) for one in self.rotary_pos_emb(hidden_states, positions))
        for index, block in enumerate(self.blocks):
            segments = frames if index in self.fullatt_block_indexes else windows
            hidden_states = block(hidden_states, segments=segments, position_embeddings=rotations, **kwargs)
        merged = self.merger(hidden_states)[order.argsort()]
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=merged)


def _by_squares(patches: torch.Tensor, order: torch.Tensor, merge: int) -> torch.Tensor:
    """patches (N, D) with its squares of merge**2 patches permuted."""
    return patches.unflatten(0, (-1, merge**2))[order].flatten(0, 1)


class Qwen2_5_VLAttention(Qwen2Attention):
    pass


class Qwen2_5_VLDecoderLayer(DecoderLayer):
    attention_class = Qwen2_5_VLAttention
    mlp_class = MistralMLP


class Qwen2_5_VLTextModel(Qwen2VLDecoder, Qwen2_5_VLPreTrainedModel):
    config: Qwen2_5_VLTextConfig
    config_class = Qwen2_5_VLTextConfig
    input_modalities = ("text",)
    layer_class = Qwen2_5_VLDecoderLayer
    _can_record_outputs = {"hidden_states": Qwen2_5_VLDecoderLayer, "attentions": Qwen2_5_VLAttention}  # noqa: RUF012


class Qwen2_5_VLModel(VideoTextModel, Qwen2_5_VLPreTrainedModel):
    tower_class = Qwen2_5_VisionTransformerPretrainedModel
    decoder_class = Qwen2_5_VLTextModel
    either_input = True
    needs_token_types = False
    arguments = model_arguments("use_cache", *VIDEO_TEXT_INPUTS, "second_per_grid_ts")

    def frame_intervals(self, seconds: Iterable[Any] | None, videos: int) -> Iterable[Any]:
        vision: Any = self.config.vision_config
        seconds = [1] * videos if seconds is None else list(seconds)
        if len(seconds) < videos:
            raise ValueError(
                f"second_per_grid_ts has {len(seconds)} entries for {videos} videos: the seconds between frames of each"
            )
        return [vision.tokens_per_second * second for second in seconds]


class Qwen2_5_VLForConditionalGeneration(VideoTextHead, Qwen2_5_VLPreTrainedModel, GenerationMixin):
    backbone_class = Qwen2_5_VLModel
    accepts_loss_kwargs = False
    arguments = head_arguments("use_cache", *VIDEO_TEXT_INPUTS, "second_per_grid_ts")
