"""Gemma 4 with images, videos and sound: its decoder over the features of its towers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import Cache, Gemma4Config, GenerationMixin, PreTrainedConfig
from transformers.models.gemma4.modeling_gemma4 import (
    Gemma4CausalLMOutputWithPast,
    Gemma4ModelOutputWithPast,
    create_masks_for_vision_model,
    get_block_sequence_ids_for_mask,
)
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults

from easytorch.cache_names import CACHE, cache_keyword, takes_cache
from easytorch.layers.arguments import ArgumentsInOrder
from easytorch.layers.basics import check_one_input
from easytorch.layers.heads import SoftcappedCausalLMHead
from easytorch.layers.image_text import ImageTextHead, TokenTypesOfPrompt, check_count, is_token
from easytorch.layers.linear import linear
from easytorch.layers.masks import Masks, masks_by_layer_type
from easytorch.layers.norm import PlainRMSNorm
from easytorch.layers.tower_outputs import tower_fields
from easytorch.models import gemma4_text
from easytorch.protocol.native_classes import new_part

KINDS = ("image", "video", "audio")
_INPUTS = (
    "input_ids",
    "pixel_values",
    "pixel_values_videos",
    "input_features",
    "attention_mask",
    "input_features_mask",
    "position_ids",
)
_PLACES = ("image_position_ids", "video_position_ids", "num_frames_per_video")


class Gemma4MultimodalEmbedder(nn.Module):
    """A tower's tokens, normalised and projected to the width of the decoder: (..., tower's) -> (..., D)."""

    def __init__(self, tower: Any, text: Any) -> None:
        super().__init__()
        width = getattr(tower, "output_proj_dims", tower.hidden_size)
        self.multimodal_hidden_size, self.text_hidden_size, self.eps = width, text.hidden_size, tower.rms_norm_eps
        self.embedding_projection = nn.Linear(width, text.hidden_size, bias=False)
        self.embedding_pre_projection_norm = PlainRMSNorm(tower.rms_norm_eps)

    def forward(self, inputs_embeds: torch.Tensor) -> torch.Tensor:
        return linear(self.embedding_projection, self.embedding_pre_projection_norm(inputs_embeds))


class Gemma4PreTrainedModel(gemma4_text.Gemma4PreTrainedModel):
    config: Gemma4Config
    config_class = Gemma4Config
    input_modalities: Any = ("image", "text", "video", "audio")
    _can_record_outputs = None
    new_part = staticmethod(new_part)

    def get_per_layer_input_embeddings(self) -> nn.Module:
        backbone: Any = self.base_model
        embedding: nn.Module = backbone.language_model.embed_tokens_per_layer
        return embedding

    def set_per_layer_input_embeddings(self, value: nn.Module) -> None:
        backbone: Any = self.base_model
        backbone.language_model.embed_tokens_per_layer = value


def masks_with_images(
    config: PreTrainedConfig,
    inputs_embeds: torch.Tensor,
    attention_mask: Any,
    cache: Cache | None,
    position_ids: torch.Tensor | None,
    mm_token_type_ids: torch.Tensor | None,
) -> Masks:
    """The masks of the decoder's types of layers. mm_token_type_ids (B, T): 1 and 2 for tokens of images and videos.

    With use_bidirectional_attention="vision" each run of those sees itself whole, in layers with a window.
    """
    if mm_token_type_ids is None or isinstance(attention_mask, Mapping) or not _sees_images(config):
        return masks_by_layer_type(config, config.layer_types, inputs_embeds, attention_mask, cache, position_ids)
    blocks = get_block_sequence_ids_for_mask(mm_token_type_ids, device=inputs_embeds.device)
    masks: Masks = create_masks_for_vision_model(
        config, inputs_embeds, attention_mask, cache, position_ids, block_sequence_ids=blocks
    )
    return masks


def _sees_images(config: Any) -> bool:
    return getattr(config, "use_bidirectional_attention", None) == "vision"


class Gemma4Model(ArgumentsInOrder, Gemma4PreTrainedModel):
    arguments = (
        *_INPUTS,
        CACHE,
        "mm_token_type_ids",
        "inputs_embeds",
        "use_cache",
        *_PLACES,
        "per_layer_inputs",
        "mm_encoder_outputs",
    )
    accepts_loss_kwargs = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        text, vision, audio = config.text_config, config.vision_config, config.audio_config
        self.vision_tower: Any = vision and self.new_part(vision)
        self.vocab_size = text.vocab_size
        self.language_model: Any = self.new_part(text)
        self.vocab_size_per_layer_input = text.vocab_size_per_layer_input
        self.audio_tower: Any = audio and self.new_part(audio)
        self.embed_vision: Any = vision and Gemma4MultimodalEmbedder(vision, text)
        self.embed_audio: Any = audio and Gemma4MultimodalEmbedder(audio, text)
        self.post_init()

    def _encode(self, pixels: torch.Tensor, places: torch.Tensor | None, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The tower's output for images or frames, its features as pooler_output; and how many each has, (I,)."""
        if self.vision_tower is None:
            raise ValueError("This model was made without config.vision_config: it takes no images and no videos")
        outputs = self.vision_tower(pixel_values=pixels, pixel_position_ids=places, **kwargs | {"return_dict": True})
        assert places is not None, "the tower refuses images without"
        outputs.pooler_output = self.embed_vision(outputs.last_hidden_state)
        patches = (places != -1).all(dim=-1).sum(dim=-1)
        tower: Any = self.config.vision_config
        return outputs, patches // tower.pooling_kernel_size**2

    @can_return_tuple
    def get_image_features(
        self, pixel_values: torch.Tensor, image_position_ids: torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        """pixel_values (I, N, values of a patch), image_position_ids (I, N, 2), -1 for padding -> the tower's output;
        pooler_output: the features (n, D) of each image."""
        outputs, sizes = self._encode(pixel_values, image_position_ids, kwargs)
        outputs.pooler_output = torch.split(outputs.pooler_output, sizes.tolist())
        return outputs

    @can_return_tuple
    def get_video_features(
        self,
        pixel_values_videos: torch.Tensor,
        video_position_ids: torch.Tensor | None = None,
        num_frames_per_video: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """`get_image_features` of the frames of all videos, one after another; pooler_output: of each video.

        num_frames_per_video (videos,), which the processor returns too.
        """
        if num_frames_per_video is None:
            raise ValueError(
                "pixel_values_videos has the frames of all videos one after another; pass num_frames_per_video, which "
                "the processor returns too"
            )
        outputs, sizes = self._encode(pixel_values_videos, video_position_ids, kwargs)
        frames = num_frames_per_video.tolist()
        if sum(frames) != len(sizes):
            raise ValueError(
                f"num_frames_per_video={frames} is {sum(frames)} in all, and pixel_values_videos has {len(sizes)}"
            )
        of_videos = [int(one.sum()) for one in torch.split(sizes, frames)]
        outputs.pooler_output = torch.split(outputs.pooler_output, of_videos)
        return outputs

    @can_return_tuple
    def get_audio_features(self, input_features: torch.Tensor, input_features_mask: torch.Tensor, **kwargs: Any) -> Any:
        """input_features (recordings, frames, mels), input_features_mask (recordings, frames), True for sound -> the
        tower's output, its features (recordings, tokens, D) as pooler_output."""
        if self.audio_tower is None:
            raise ValueError("This model was made without config.audio_config: it takes no sound")
        outputs = self.audio_tower(input_features, input_features_mask, **kwargs | {"return_dict": True})
        outputs.pooler_output = self.embed_audio(outputs.last_hidden_state)
        return outputs

    def get_placeholder_mask(
        self, input_ids: torch.Tensor | None = None, inputs_embeds: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Masks (B, T): True at the placeholders of images, of videos and of sound; without input_ids those with the
        embedding of the token of each."""
        embedding: Any = self.get_input_embeddings()
        given: Any = inputs_embeds
        tokens = (getattr(self.config, f"{kind}_token_id") for kind in KINDS)
        return tuple(is_token(token, input_ids, given, embedding) for token in tokens)

    def _features(
        self, pixels: Mapping[str, Any], places: Mapping[str, Any], mm_encoder_outputs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """By kind of input, the tower's output, and the features (n, D) of all of it. pixels, places: what each kind is
        given, or None."""
        given: dict[str, Any] = {}
        found: dict[str, torch.Tensor] = {}
        for kind in KINDS[:2]:
            outputs = mm_encoder_outputs.get(kind)
            if outputs is None and pixels[kind] is not None:
                get: Any = getattr(self, f"get_{kind}_features")
                outputs = get(pixels[kind], **places[kind], return_dict=True)
            if outputs is not None:
                given[kind], found[kind] = outputs, torch.cat(tuple(outputs.pooler_output))
        sound, mask = pixels["audio"], places["audio"]["input_features_mask"]
        if sound is not None and mask is not None:
            outputs = given["audio"] = self.get_audio_features(sound, mask, return_dict=True)
            found["audio"] = outputs.pooler_output[outputs.attention_mask.to(outputs.pooler_output.device)]
        return given, found

    @takes_cache
    @merge_with_config_defaults
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        pixel_values_videos: torch.Tensor | None = None,
        input_features: torch.Tensor | None = None,
        attention_mask: Any = None,
        input_features_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        mm_token_type_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        image_position_ids: torch.Tensor | None = None,
        video_position_ids: torch.Tensor | None = None,
        num_frames_per_video: torch.Tensor | None = None,
        per_layer_inputs: torch.Tensor | None = None,
        mm_encoder_outputs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Gemma4ModelOutputWithPast:
        """The decoder's arguments, and what `get_image_features`, `get_video_features` and `get_audio_features` take,
        whose placeholders are in input_ids (B, T); mm_token_type_ids (B, T): 1 for those of images, 2 of videos.

        mm_encoder_outputs: {"image": the output of `get_image_features`}, or of "video", in place of the pixels.
        """
        kwargs.pop("labels", None)  # those of the head, which transformers' class passes on
        check_one_input(input_ids, inputs_embeds)
        if input_ids is not None and per_layer_inputs is not None:
            raise ValueError("You cannot specify per_layer_inputs if input_ids is provided")
        pixels = {"image": pixel_values, "video": pixel_values_videos, "audio": input_features}
        if mm_encoder_outputs is not None and (pixel_values is not None or pixel_values_videos is not None):
            raise ValueError(
                "You cannot specify both pixel_values/pixel_values_videos and mm_encoder_outputs at the same time"
            )
        masks = dict(zip(KINDS, self.get_placeholder_mask(input_ids, inputs_embeds), strict=True))
        inputs_embeds, per_layer_inputs = self._embed(input_ids, inputs_embeds, per_layer_inputs, masks)
        places = {
            "image": {"image_position_ids": image_position_ids},
            "video": {"video_position_ids": video_position_ids, "num_frames_per_video": num_frames_per_video},
            "audio": {"input_features_mask": input_features_mask},
        }
        towers, features = self._features(pixels, places, mm_encoder_outputs or {})
        for kind, one in features.items():
            check_count(kind, getattr(self.config, f"{kind}_token_id"), masks[kind].sum(), one.shape[0])
            one = features[kind] = one.to(inputs_embeds.device, inputs_embeds.dtype)
            inputs_embeds = inputs_embeds.masked_scatter(masks[kind][..., None].to(inputs_embeds.device), one)
        text = self.config.get_text_config()
        outputs = self.language_model(
            attention_mask=masks_with_images(
                text, inputs_embeds, attention_mask, cache, position_ids, mm_token_type_ids
            ),
            position_ids=position_ids,
            **cache_keyword(cache),
            inputs_embeds=inputs_embeds,
            per_layer_inputs=per_layer_inputs,
            **kwargs | {"return_dict": True},
        )
        return Gemma4ModelOutputWithPast(
            **dict(outputs.items()),
            # as transformers' class, without those of videos
            **tower_fields(
                Gemma4ModelOutputWithPast,
                {kind: towers.get(kind) for kind in ("image", "audio")},
                {kind: features.get(kind) for kind in ("image", "audio")},
            ),
        )

    def _embed(
        self,
        input_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        per_layer_inputs: torch.Tensor | None,
        masks: Mapping[str, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(B, T, D) and what the layers are given of each token, (B, T, L, P); placeholders are padding in both."""
        text = self.config.get_text_config()
        placeholders = masks["image"] | masks["video"] | masks["audio"]
        embedding: Any = self.get_input_embeddings()
        if input_ids is not None:
            input_ids = torch.where(placeholders, text.pad_token_id, input_ids)
            inputs_embeds = embedding(input_ids)
        assert inputs_embeds is not None
        if per_layer_inputs is None and text.hidden_size_per_layer_input:
            plain = None
            if input_ids is None:
                padding = embedding(torch.tensor(text.pad_token_id, device=inputs_embeds.device))
                plain = torch.where(placeholders[..., None].to(inputs_embeds.device), padding, inputs_embeds)
            per_layer_inputs = self.language_model.get_per_layer_inputs(input_ids, plain)
        return inputs_embeds, per_layer_inputs


class Gemma4ForConditionalGeneration(
    ImageTextHead, TokenTypesOfPrompt, SoftcappedCausalLMHead, Gemma4PreTrainedModel, GenerationMixin
):
    backbone_class = Gemma4Model
    output_class = Gemma4CausalLMOutputWithPast
    token_types = "mm_token_type_ids"
    masks_of_types = staticmethod(masks_with_images)
    accepts_loss_kwargs = False
    backbone_keeps = True
    backbone_arguments = (
        "pixel_values",
        "pixel_values_videos",
        "input_features",
        "input_features_mask",
        "mm_token_type_ids",
        *_PLACES,
        "per_layer_inputs",
        "mm_encoder_outputs",
        "shared_kv_states",
        "return_shared_kv_states",
    )
    arguments = (
        *_INPUTS,
        *_PLACES,
        CACHE,
        "mm_token_type_ids",
        "inputs_embeds",
        "labels",
        "use_cache",
        "logits_to_keep",
        "per_layer_inputs",
        "mm_encoder_outputs",
    )

    def prepare_inputs_for_generation(
        self, input_ids: Any, use_cache: bool = True, is_first_iteration: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """per_layer_inputs are of the prompt's embeddings: later tokens have ids."""
        inputs = super().prepare_inputs_for_generation(
            input_ids, use_cache=use_cache, is_first_iteration=is_first_iteration, **kwargs
        )
        if not is_first_iteration:
            inputs.pop("per_layer_inputs", None)
        return inputs
