"""Qwen2-VL (arXiv:2409.12191): Qwen 2's decoder over images and videos of any size, with 3-dimensional positions."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import GenerationMixin, Qwen2VLConfig
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig, Qwen2VLVisionConfig
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs
from transformers.vision_utils import get_vision_attention_seqlens, get_vision_position_ids

from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.linear import linear, watched
from easytorch.layers.mlp import PlainMLP
from easytorch.layers.multimodal_positions import MultimodalPositions, MultimodalRotaryEmbedding
from easytorch.layers.norm import LayerNorm
from easytorch.layers.packed_tower import (
    PackedAttention,
    PackedBlock,
    PackedPatches,
    VisionRotaryEmbedding,
    segments_of,
)
from easytorch.layers.video_text import (
    VIDEO_TEXT_INPUTS,
    VideoTextHead,
    VideoTextModel,
    head_arguments,
    model_arguments,
)
from easytorch.models.mistral import MistralMLP
from easytorch.models.qwen2 import Qwen2Attention
from easytorch.protocol.native import NativeVideoText


class VisionAttention(PackedAttention):
    pass


class VisionMlp(PlainMLP):
    up_name, down_name, act_name = "fc1", "fc2", "act"


class Qwen2VLVisionBlock(PackedBlock):
    attention_class = VisionAttention

    def __init__(self, config: Any) -> None:
        width = config.embed_dim
        super().__init__(config, width, VisionMlp(width, int(width * config.mlp_ratio), config.hidden_act, bias=True))


class PatchMerger(nn.Module):
    """Concatenates the patches of a square to one token of the decoder: (N, D of the tower) -> (N / merge**2, D)."""

    norm_class: ClassVar[type[nn.Module]] = LayerNorm

    def __init__(self, dim: int, context_dim: int, spatial_merge_size: int) -> None:
        super().__init__()
        self.hidden_size = context_dim * spatial_merge_size**2
        self.ln_q: nn.Module = self.norm_class(context_dim, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(self.hidden_size, self.hidden_size), nn.GELU(), nn.Linear(self.hidden_size, dim)
        )

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        squares = self.ln_q(patches).view(-1, self.hidden_size)
        if type(self.mlp) is not nn.Sequential or len(self.mlp) != 3 or watched(self.mlp):
            return self.mlp(squares)
        up, act, down = self.mlp
        return linear(down, act(linear(up, squares)))


class Qwen2VLPreTrainedModel(NativeVideoText):
    config: Qwen2VLConfig
    config_class = Qwen2VLConfig
    _no_split_modules = ["Qwen2VLDecoderLayer", "Qwen2VLVisionBlock"]  # noqa: RUF012


class Qwen2VisionTransformerPretrainedModel(Qwen2VLPreTrainedModel):
    config: Qwen2VLVisionConfig
    config_class = Qwen2VLVisionConfig
    input_modalities = ("image", "video")
    _no_split_modules = ["Qwen2VLVisionBlock"]  # noqa: RUF012
    _input_embed_layer = "patch_embed"
    _can_record_outputs = {"hidden_states": Qwen2VLVisionBlock, "attentions": VisionAttention}  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        width = config.embed_dim
        self.spatial_merge_size = config.spatial_merge_size
        self.patch_embed = PackedPatches(config, width)
        self.rotary_pos_emb = VisionRotaryEmbedding(config, width)
        self.blocks = nn.ModuleList(Qwen2VLVisionBlock(config) for _ in range(config.depth))
        self.merger = PatchMerger(config.hidden_size, width, config.spatial_merge_size)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(self, hidden_states: torch.Tensor, grid_thw: torch.Tensor, **kwargs: Any) -> BaseModelOutputWithPooling:
        """hidden_states (N, values of a patch), grid_thw (I, 3) -> last_hidden_state (N, D), pooler_output
        (N / merge**2, the decoder's D). Patches attend within their frame."""
        positions = get_vision_position_ids(grid_thw, self.spatial_merge_size, kwargs=kwargs)
        segments = segments_of(get_vision_attention_seqlens(grid_thw, self.config, kwargs=kwargs)[0])
        hidden_states = self.patch_embed(hidden_states)
        rotations = self.rotary_pos_emb(hidden_states, positions)
        for block in self.blocks:
            hidden_states = block(hidden_states, segments=segments, position_embeddings=rotations, **kwargs)
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=self.merger(hidden_states))


class Qwen2VLRotaryEmbedding(MultimodalRotaryEmbedding):
    default_section = (16, 24, 24)


class Qwen2VLAttention(Qwen2Attention):
    pass


class Qwen2VLDecoderLayer(DecoderLayer):
    attention_class = Qwen2VLAttention
    mlp_class = MistralMLP


class Qwen2VLDecoder(MultimodalPositions, DecoderBackbone):
    rotary_class = Qwen2VLRotaryEmbedding
    plain_positions_pack = False


class Qwen2VLTextModel(Qwen2VLDecoder, Qwen2VLPreTrainedModel):
    config: Qwen2VLTextConfig
    config_class = Qwen2VLTextConfig
    input_modalities = ("text",)
    layer_class = Qwen2VLDecoderLayer
    _can_record_outputs = {"hidden_states": Qwen2VLDecoderLayer, "attentions": Qwen2VLAttention}  # noqa: RUF012


class Qwen2VLModel(VideoTextModel, Qwen2VLPreTrainedModel):
    tower_class = Qwen2VisionTransformerPretrainedModel
    decoder_class = Qwen2VLTextModel
    either_input = True
    arguments = model_arguments("use_cache", *VIDEO_TEXT_INPUTS)


class Qwen2VLForConditionalGeneration(VideoTextHead, Qwen2VLPreTrainedModel, GenerationMixin):
    backbone_class = Qwen2VLModel
    arguments = head_arguments("use_cache", *VIDEO_TEXT_INPUTS)
