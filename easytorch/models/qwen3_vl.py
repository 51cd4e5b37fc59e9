"""Qwen3-VL (arXiv:2511.21631): Qwen 3's decoder, to whose first layers features of the tower's layers are added."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import GenerationMixin, Qwen3VLConfig, Qwen3VLTextConfig, Qwen3VLVisionConfig
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs
from transformers.vision_utils import (
    get_vision_attention_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

from easytorch.layers.decoder import DecoderBackbone, DecoderLayer
from easytorch.layers.head_norm import HeadNormAttention
from easytorch.layers.linear import linear
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
from easytorch.layers.stock_names import given_by, product_of
from easytorch.layers.video_text import (
    VIDEO_TEXT_INPUTS,
    VideoTextHead,
    VideoTextModel,
    head_arguments,
    model_arguments,
)
from easytorch.models.qwen3 import Qwen3MLP
from easytorch.protocol.native import NativeVideoText


class Qwen3VLVisionAttention(PackedAttention):
    pass


class Qwen3VLVisionMLP(PlainMLP):
    up_name, down_name = "linear_fc1", "linear_fc2"


class Qwen3VLVisionBlock(PackedBlock):
    attention_class = Qwen3VLVisionAttention

    def __init__(self, config: Any) -> None:
        mlp = Qwen3VLVisionMLP(config.hidden_size, config.intermediate_size, config.hidden_act, bias=True)
        super().__init__(config, config.hidden_size, mlp)


class Qwen3VLVisionPatchMerger(nn.Module):
    """Concatenates the patches of a square to one token of the decoder: (N, D of the tower) -> (N / merge**2, D).

    use_postshuffle_norm: normalize after the concatenation, not each patch.
    """

    def __init__(self, config: Any, *, use_postshuffle_norm: bool = False) -> None:
        super().__init__()
        self.hidden_size = config.hidden_size * config.spatial_merge_size**2
        self.use_postshuffle_norm = use_postshuffle_norm
        self.norm = LayerNorm(self.hidden_size if use_postshuffle_norm else config.hidden_size, eps=1e-6)
        self.linear_fc1 = nn.Linear(self.hidden_size, self.hidden_size)
        self.act_fn = nn.GELU()
        self.linear_fc2 = nn.Linear(self.hidden_size, config.out_hidden_size)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        squares = patches.view(-1, self.hidden_size) if self.use_postshuffle_norm else patches
        squares = self.norm(squares).view(-1, self.hidden_size)
        return linear(self.linear_fc2, self.act_fn(linear(self.linear_fc1, squares)))


class Qwen3VLTextRotaryEmbedding(MultimodalRotaryEmbedding):
    default_section = (24, 20, 20)
    mrope_interleaved = True


class Qwen3VLTextAttention(HeadNormAttention):
    pass


class Qwen3VLTextDecoderLayer(DecoderLayer):
    """Qwen 3's layer; the first ones add features of the tower's layers to their output at placeholders (deepstack)."""

    attention_class = Qwen3VLTextAttention
    mlp_class = Qwen3MLP

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.layer_idx = layer_idx

    def __call__(
        self,
        hidden_states: torch.Tensor,
        *args: Any,
        visual_pos_masks: torch.Tensor | None = None,
        deepstack_visual_embeds: list[torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        # not in `forward`: as in transformers, hooks record the output without them
        hidden_states = super().__call__(hidden_states, *args, **kwargs)
        if deepstack_visual_embeds is None or self.layer_idx >= len(deepstack_visual_embeds):
            return hidden_states
        return _added(hidden_states, visual_pos_masks, deepstack_visual_embeds[self.layer_idx])


def _added(hidden_states: torch.Tensor, here: Any, features: torch.Tensor) -> torch.Tensor:
    """hidden_states (B, T, D) plus features (n, D) at the n positions where `here` (B, T) is True."""
    here, features = here.to(hidden_states.device), features.to(hidden_states.device, hidden_states.dtype)
    return hidden_states + torch.zeros_like(hidden_states).masked_scatter(here[..., None], features)


class Qwen3VLPreTrainedModel(NativeVideoText):
    config: Qwen3VLConfig
    config_class = Qwen3VLConfig
    _no_split_modules = ["Qwen3VLTextDecoderLayer", "Qwen3VLVisionBlock"]  # noqa: RUF012
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": Qwen3VLTextDecoderLayer,
        "attentions": Qwen3VLTextAttention,
    }


class Qwen3VLVisionModel(Qwen3VLPreTrainedModel):
    """config.deepstack_visual_indexes: the layers whose features are given too; a config may have none of that name."""

    patch_size = given_by("config.patch_size")
    spatial_merge_unit = product_of("spatial_merge_size", "spatial_merge_size")
    interpolation_align_corners, interpolation_mode = True, "bilinear"
    config: Any
    config_class: Any = Qwen3VLVisionConfig
    block_class: ClassVar[type[Qwen3VLVisionBlock]] = Qwen3VLVisionBlock
    input_modalities = ("image", "video")
    _can_record_outputs = {"hidden_states": Qwen3VLVisionBlock, "attentions": Qwen3VLVisionAttention}  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.spatial_merge_size = config.spatial_merge_size
        self.patch_embed = PackedPatches(config, width, bias=True)
        self.pos_embed = nn.Embedding(config.num_position_embeddings, width)
        self.num_grid_per_side = int(config.num_position_embeddings**0.5)
        self.rotary_pos_emb = VisionRotaryEmbedding(config, width)
        self.blocks = nn.ModuleList(self.block_class(config) for _ in range(config.depth))
        self.merger = Qwen3VLVisionPatchMerger(config)
        self.deepstack_visual_indexes = getattr(config, "deepstack_visual_indexes", None)
        if self.deepstack_visual_indexes is not None:
            self.deepstack_merger_list = nn.ModuleList(
                Qwen3VLVisionPatchMerger(config, use_postshuffle_norm=True) for _ in self.deepstack_visual_indexes
            )
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(self, hidden_states: torch.Tensor, grid_thw: torch.Tensor, **kwargs: Any) -> BaseModelOutputWithPooling:
        """hidden_states (N, a patch's), grid_thw (I, 3) -> last_hidden_state (N, D), pooler_output (N / merge**2, the
        decoder's D), and deepstack_features, the like of each layer `config.deepstack_visual_indexes`."""
        near, shares = get_vision_interpolation_indices_and_weights(
            grid_thw,
            num_grid_per_side=self.num_grid_per_side,
            mode="bilinear",
            align_corners=True,
            spatial_merge_size=self.spatial_merge_size,
            kwargs=kwargs,
        )
        positions = get_vision_position_ids(grid_thw, self.spatial_merge_size, kwargs=kwargs)
        segments = segments_of(get_vision_attention_seqlens(grid_thw, self.config, kwargs=kwargs)[0])
        hidden_states = self.patch_embed(hidden_states)
        learned = (self.pos_embed(near) * shares[:, :, None]).sum(1)
        hidden_states = hidden_states + learned.to(hidden_states.dtype)
        rotations = self.rotary_pos_emb(hidden_states, positions)
        indexes: list[int] = list(self.deepstack_visual_indexes or ())
        features = []
        for index, block in enumerate(self.blocks):
            hidden_states = block(hidden_states, segments=segments, position_embeddings=rotations, **kwargs)
            if index in indexes:
                features.append(self.deepstack_merger_list[indexes.index(index)](hidden_states))
        if self.deepstack_visual_indexes is None:
            return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=self.merger(hidden_states))
        return BaseModelOutputWithDeepstackFeatures(
            last_hidden_state=hidden_states,
            pooler_output=self.merger(hidden_states),
            deepstack_features=features,
        )


class Qwen3VLTextModel(MultimodalPositions, DecoderBackbone, Qwen3VLPreTrainedModel):
    config: Qwen3VLTextConfig
    config_class = Qwen3VLTextConfig
    input_modalities = ("text",)
    layer_class = Qwen3VLTextDecoderLayer
    rotary_class = Qwen3VLTextRotaryEmbedding


class Qwen3VLModel(VideoTextModel, Qwen3VLPreTrainedModel):
    tower_class: ClassVar[type[Any]] = Qwen3VLVisionModel
    decoder_class: ClassVar[type[Any]] = Qwen3VLTextModel
    frames_apart = True
    arguments = model_arguments(*VIDEO_TEXT_INPUTS)

    def split(self, outputs: Any, sizes: list[int]) -> Any:
        outputs.deepstack_features = [torch.split(level, sizes) for level in outputs.deepstack_features]
        return super().split(outputs, sizes)

    def decoder_arguments(self, found: dict[str, tuple[Any, torch.Tensor]]) -> dict[str, Any]:
        if not found:
            return {}
        levels = [[torch.cat(tuple(level)) for level in outputs.deepstack_features] for outputs, _ in found.values()]
        masks = [here for _, here in found.values()]
        if len(masks) == 1:
            return {"visual_pos_masks": masks[0], "deepstack_visual_embeds": levels[0]}
        here = masks[0] | masks[1]
        joint = []
        for of_images, of_videos in zip(*levels, strict=True):
            features = of_images.new_zeros(*here.shape, of_images.shape[-1])
            features = features.masked_scatter(masks[0][..., None], of_images)
            joint.append(features.masked_scatter(masks[1][..., None], of_videos)[here])
        return {"visual_pos_masks": here, "deepstack_visual_embeds": joint}


class Qwen3VLForConditionalGeneration(VideoTextHead, Qwen3VLPreTrainedModel, GenerationMixin):
    backbone_class = Qwen3VLModel
    accepts_loss_kwargs = False
    arguments = head_arguments(*VIDEO_TEXT_INPUTS)
