"""Models of images, videos and text: a vision tower over a variable number of patches, and a decoder with positions in
three dimensions (M-RoPE, arXiv:2409.12191).

Legend: B batch, T tokens, I images or videos, N patches of all of them, D hidden size of the decoder.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from transformers import Cache, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from easytorch.cache_names import CACHE, cache_keyword, takes_cache
from easytorch.layers.arguments import ArgumentsInOrder
from easytorch.layers.basics import check_one_input
from easytorch.layers.image_text import ImageTextHead, check_count, is_token
from easytorch.layers.multimodal_positions import IMAGE, VIDEO, Grid, token_positions, vision_positions
from easytorch.layers.packed_tower import check_grids
from easytorch.layers.tower_outputs import asked_of_towers, tower_fields, with_towers

logger = logging.getLogger(__name__)

KINDS = {"image": IMAGE, "video": VIDEO}

# The outputs of a processor for images and videos, in the order of transformers' forwards.
VIDEO_TEXT_INPUTS = (
    "pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw", "mm_token_type_ids",
)  # fmt: skip
_TEXT_INPUTS = ("input_ids", "attention_mask", "position_ids", CACHE, "inputs_embeds")


def model_arguments(*inputs: str) -> tuple[str, ...]:
    """The arguments of a model's forward in transformers' order, `inputs` among them."""
    return (*_TEXT_INPUTS, *inputs, "mm_encoder_outputs")


def head_arguments(*inputs: str) -> tuple[str, ...]:
    """`model_arguments` for a model with a language modeling head."""
    return (*_TEXT_INPUTS, "labels", *inputs, "logits_to_keep", "mm_encoder_outputs")


class VideoTextModel(ArgumentsInOrder):
    """The decoder over embeddings in which the features of images and videos replace their placeholder tokens.

    As in transformers, `rope_deltas` has for each row of the last prompt its next position minus its number of tokens;
    generated tokens are positioned with it.
    """

    tower_class: ClassVar[type[PreTrainedModel]]
    decoder_class: ClassVar[type[PreTrainedModel]]
    base_model_prefix = "model"
    accepts_loss_kwargs = False
    either_input: ClassVar[bool] = False  # input_ids may be given beside inputs_embeds, to say where images are
    frames_apart: ClassVar[bool] = False  # the text has a timestamp before each frame of a video
    needs_token_types: ClassVar[bool] = True  # else images without mm_token_type_ids are placed as text is

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.visual = self.tower_class._from_config(config.vision_config)
        self.language_model = self.decoder_class._from_config(config.text_config)
        decoder: Any = self.decoder_class
        self.output_class = with_towers(decoder.output_class, type(config).model_type)
        self.rope_deltas: torch.Tensor | None = None
        self.post_init()

    def encode(self, kind: str, pixels: torch.Tensor, grids: torch.Tensor | None, given: dict[str, Any]) -> Any:
        """The tower's output for images or videos; `pooler_output` is a tuple of (n, D). given: other arguments."""
        grids = check_grids(pixels, grids, self.visual.spatial_merge_size)
        given = {name.removeprefix(f"{kind}_"): value for name, value in given.items()}
        outputs = self.visual(pixels.type(self.visual.dtype), grid_thw=grids, **given | {"return_dict": True})
        sizes = (grids.prod(-1) // self.visual.spatial_merge_size**2).tolist()
        return self.split(outputs, sizes)

    def split(self, outputs: Any, sizes: list[int]) -> Any:
        """The tower's output with its features split by image; sizes: the number of features of each."""
        outputs.pooler_output = torch.split(outputs.pooler_output, sizes)
        return outputs

    @can_return_tuple
    def get_image_features(
        self, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        """pixel_values (N, values of a patch), image_grid_thw (I, 3) -> the tower's output, features split by image."""
        return self.encode("image", pixel_values, image_grid_thw, kwargs)

    @can_return_tuple
    def get_video_features(
        self, pixel_values_videos: torch.Tensor, video_grid_thw: torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        """`get_image_features` for videos."""
        return self.encode("video", pixel_values_videos, video_grid_thw, kwargs)

    def get_placeholder_mask(
        self,
        input_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor,
        image_features: torch.Tensor | None = None,
        video_features: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Two masks (B, T, 1): True at placeholders of images, and of videos. `ValueError` unless there is one for each
        feature. Without input_ids they are found by the embedding of the image and the video token.
        """
        masks = []
        for kind, features in (("image", image_features), ("video", video_features)):
            token = getattr(self.config, f"{kind}_token_id")
            found = is_token(token, input_ids, inputs_embeds, self.get_input_embeddings())
            if features is not None:
                check_count(kind, token, found.sum(), features.shape[0])
            masks.append(found[..., None].to(inputs_embeds.device))
        return masks[0], masks[1]

    def get_vision_position_ids(
        self,
        start_position: int,
        grid_thw: Any,
        temp_merge_size: int = 1,
        spatial_merge_size: int = 1,
        time_interval: float | torch.Tensor = 1.0,
        device: Any = None,
    ) -> torch.Tensor:
        """(3, n): time, height and width of the tokens of one image or video, the first of them at start_position."""
        time, height, width = (int(size) for size in grid_thw)
        grid = [time // temp_merge_size, height, width]
        return vision_positions(start_position, grid, spatial_merge_size, time_interval, device)

    def grids_of(self, kind: str, grids: torch.Tensor) -> list[Grid]:
        """The grids of images and videos in the order of the text."""
        if kind == "image" or not self.frames_apart:
            found: list[Grid] = grids.tolist()
            return found
        return [[1, height, width] for time, height, width in grids.tolist() for _ in range(time)]

    def frame_intervals(self, seconds: Iterable[Any] | None, videos: int) -> Iterable[Any]:
        """The distance in positions between frames, for each video. seconds: between frames, or None."""
        return [1] * videos

    def get_rope_index(
        self,
        input_ids: torch.Tensor,
        mm_token_type_ids: torch.Tensor,
        image_grid_thw: torch.Tensor | None = None,
        video_grid_thw: torch.Tensor | None = None,
        second_per_grid_ts: Iterable[Any] | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """mm_token_type_ids (B, T), 0 for text, 1 for images, 2 for videos -> positions (3, B, T), deltas (B, 1)."""
        given = {"image": image_grid_thw, "video": video_grid_thw}
        grids = {KINDS[kind]: self.grids_of(kind, one) for kind, one in given.items() if one is not None}
        intervals = self.frame_intervals(second_per_grid_ts, len(grids.get(VIDEO, ())))
        merge = self.config.vision_config.spatial_merge_size
        return token_positions(mm_token_type_ids, grids, merge, intervals, attention_mask)

    @takes_cache
    def compute_3d_position_ids(
        self,
        input_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor,
        image_grid_thw: torch.Tensor | None = None,
        video_grid_thw: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        mm_token_type_ids: torch.Tensor | None = None,
        second_per_grid_ts: Iterable[Any] | None = None,
    ) -> torch.Tensor | None:
        """(3, B, T) for a prompt with images or videos and for tokens generated after one; None for text alone."""
        past = 0 if cache is None else cache.get_seq_length()
        seen = image_grid_thw is not None or video_grid_thw is not None
        if seen and input_ids is not None and mm_token_type_ids is None:
            missing = "positions of images and videos need mm_token_type_ids, which the processor returns too"
            if self.needs_token_types:
                raise ValueError(f"{missing}: pass them, or position_ids")
            logger.warning("%s; without them, as in transformers, text positions are used", missing)
        if seen and input_ids is not None and mm_token_type_ids is not None and (self.rope_deltas is None or past == 0):
            positions, self.rope_deltas = self.get_rope_index(
                input_ids,
                mm_token_type_ids,
                image_grid_thw=image_grid_thw,
                video_grid_thw=video_grid_thw,
                second_per_grid_ts=second_per_grid_ts,
                attention_mask=attention_mask,
            )
            return positions
        # a prompt of text alone does not use the deltas of an earlier one
        if self.rope_deltas is None or (past == 0 and input_ids is not None):
            return None
        batch, length, _ = inputs_embeds.shape
        device = inputs_embeds.device
        if attention_mask is not None:
            plain = (attention_mask.long().cumsum(-1) - 1).masked_fill(attention_mask == 0, 0)
            plain = plain[:, -length:].to(device)  # the mask covers the cached tokens too
        else:
            plain = torch.arange(past, past + length, device=device).expand(batch, -1)
        deltas = self.rope_deltas.repeat_interleave(batch // self.rope_deltas.shape[0], dim=0)
        return (plain + deltas.to(device)).expand(3, -1, -1)

    def decoder_arguments(self, found: dict[str, tuple[Any, torch.Tensor]]) -> dict[str, Any]:
        """Further arguments of the decoder. found: for images and for videos the tower's output, and the mask (B, T) of
        its placeholders."""
        return {}

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: Any = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        pixel_values_videos: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        video_grid_thw: torch.Tensor | None = None,
        mm_token_type_ids: torch.Tensor | None = None,
        second_per_grid_ts: Iterable[Any] | None = None,
        mm_encoder_outputs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """The decoder's arguments, and pixel_values (N, values of a patch) with image_grid_thw (I, 3) for images, whose
        placeholders in input_ids (B, T) have mm_token_type_ids (B, T) of 1; likewise for videos, of 2.

        mm_encoder_outputs: {"image": the output of `get_image_features`}, or of "video", in place of the pixels.
        """
        if not (self.either_input and inputs_embeds is not None):
            check_one_input(input_ids, inputs_embeds)
        pixels = {"image": (pixel_values, image_grid_thw), "video": (pixel_values_videos, video_grid_thw)}
        if mm_encoder_outputs is not None and any(one is not None for one, _ in pixels.values()):
            raise ValueError(
                "You cannot specify both pixel_values/pixel_values_videos and mm_encoder_outputs at the same time"
            )
        # precomputed outside a traced graph: image_cu_seqlens, video_position_ids, ...
        precomputed = {
            kind: {name: kwargs.pop(name) for name in list(kwargs) if name.startswith(f"{kind}_")} for kind in pixels
        }
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        asked = asked_of_towers(self.output_class, kwargs)
        found = {}
        for kind, (values, grids) in pixels.items():
            outputs = (mm_encoder_outputs or {}).get(kind)
            if values is not None:
                get: Any = getattr(self, f"get_{kind}_features")
                outputs = get(values, grids, return_dict=True, **precomputed[kind], **asked)
            if outputs is None:
                continue
            features = torch.cat(tuple(outputs.pooler_output)).to(inputs_embeds.device, inputs_embeds.dtype)
            masks = self.get_placeholder_mask(input_ids, inputs_embeds, **{f"{kind}_features": features})
            here = masks[list(pixels).index(kind)]
            inputs_embeds = inputs_embeds.masked_scatter(here, features)
            found[kind] = (outputs, here[..., 0])
        if position_ids is None:
            position_ids = self.compute_3d_position_ids(
                input_ids,
                inputs_embeds,
                image_grid_thw=image_grid_thw,
                video_grid_thw=video_grid_thw,
                attention_mask=attention_mask,
                cache=cache,
                mm_token_type_ids=mm_token_type_ids,
                **({} if second_per_grid_ts is None else {"second_per_grid_ts": second_per_grid_ts}),
            )
        outputs = self.language_model(
            attention_mask=attention_mask,
            position_ids=position_ids,
            **cache_keyword(cache),
            inputs_embeds=inputs_embeds,
            **self.decoder_arguments(found),
            **kwargs | {"return_dict": True},
        )
        towers = {kind: one for kind, (one, _) in found.items()}
        return self.output_class(**dict(outputs.items()), **tower_fields(self.output_class, towers, {}))


class VideoTextHead(ImageTextHead):
    """`CausalLMHead` of a `VideoTextModel`."""

    output_class = with_towers(CausalLMOutputWithPast)
    backbone_arguments = (
        "pixel_values",
        "pixel_values_videos",
        "image_grid_thw",
        "video_grid_thw",
        "mm_token_type_ids",
        "second_per_grid_ts",
        "mm_encoder_outputs",
    )

    def get_video_features(self, pixel_values_videos: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The backbone's method."""
        backbone: Any = self.base_model
        return backbone.get_video_features(pixel_values_videos, *args, **kwargs)

    def _prepare_position_ids_for_generation(self, inputs_tensor: torch.Tensor, model_kwargs: dict[str, Any]) -> Any:
        """(4, B, T): positions of text, then those in three dimensions; `generate` extends them for each token."""
        prepare: Any = super()._prepare_position_ids_for_generation  # type: ignore[misc]
        plain: torch.Tensor = prepare(inputs_tensor, model_kwargs)
        backbone: Any = self.base_model
        cache, types = model_kwargs.get(CACHE), model_kwargs.get("mm_token_type_ids")
        past = 0 if cache is None else cache.get_seq_length()
        # rope_deltas are of an earlier call: with images among the uncached tokens they are computed again
        more = types is not None and bool(types[:, past:].any())
        if past and backbone.rope_deltas is not None and not more:
            return plain[None] + backbone.rope_deltas
        if "input_ids" in model_kwargs and model_kwargs["input_ids"].shape[1]:
            inputs_tensor = model_kwargs["input_ids"]
        seen = any(model_kwargs.get(f"{kind}_grid_thw") is not None for kind in KINDS)
        if inputs_tensor.dim() == 2 and not inputs_tensor.is_floating_point() and types is not None and seen:
            given = {name: value for name, value in model_kwargs.items() if name != "input_ids"}
            positions, backbone.rope_deltas = backbone.get_rope_index(inputs_tensor, **given)
        else:
            positions = plain.expand(3, -1, -1)
            backbone.rope_deltas = torch.zeros(inputs_tensor.shape[0], 1, dtype=torch.long, device=inputs_tensor.device)
        return torch.cat((plain[None], positions))
