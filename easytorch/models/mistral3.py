"""Mistral Small 3.1: Pixtral's tower, squares of patches merged into tokens, and a decoder of any family."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, Mistral3Config
from transformers.models.mistral3.modeling_mistral3 import Mistral3CausalLMOutputWithPast, Mistral3ModelOutputWithPast
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults

from easytorch.cache_names import CACHE
from easytorch.layers.basics import activation
from easytorch.layers.image_text import ImageTextHead, ImageTextModel, with_hidden_states
from easytorch.layers.linear import linear
from easytorch.layers.norm import RMSNorm
from easytorch.protocol.native import NativeImageText

_INPUTS = ("input_ids", "pixel_values", "attention_mask", "position_ids", CACHE, "inputs_embeds")


class Mistral3PatchMerger(nn.Module):
    """A token of each square of patches: (N, D) -> (N / spatial_merge_size ** 2, D)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, self.spatial_merge_size = config.vision_config.hidden_size, config.spatial_merge_size
        self.patch_size = config.vision_config.patch_size
        self.merging_layer = nn.Linear(width * self.spatial_merge_size**2, width, bias=False)

    def forward(self, image_features: torch.Tensor, image_sizes: torch.Tensor) -> torch.Tensor:
        """image_sizes (I, 2): the pixels of each image."""
        size, squares = self.spatial_merge_size, []
        grids = [(int(height) // self.patch_size, int(width) // self.patch_size) for height, width in image_sizes]
        for patches, grid in zip(image_features.split([rows * columns for rows, columns in grids]), grids, strict=True):
            squares.append(F.unfold(patches.unflatten(0, grid).permute(2, 0, 1)[None], size, stride=size)[0].T)
        return linear(self.merging_layer, torch.cat(squares))


class Mistral3MultiModalProjector(nn.Module):
    """linear_2(act(linear_1(merge(norm(x))))): (N, features of the tower) -> (tokens, D)."""

    num_feature_layers = 1

    def __init__(self, config: Any) -> None:
        super().__init__()
        layers, hidden, bias = (
            config.vision_feature_layer,
            config.text_config.hidden_size,
            config.multimodal_projector_bias,
        )
        if not isinstance(layers, int) and len(layers) != 1:
            raise ValueError(
                f"mistral3: config.vision_feature_layer={layers}; the projector takes the features of one layer"
            )
        self.norm = RMSNorm(config.vision_config.hidden_size, eps=config.text_config.rms_norm_eps)
        self.patch_merger = Mistral3PatchMerger(config)
        self.linear_1 = nn.Linear(config.vision_config.hidden_size, hidden, bias=bias)
        self.act = activation(config.projector_hidden_act)
        self.linear_2 = nn.Linear(hidden, hidden, bias=bias)

    def forward(self, image_features: torch.Tensor, image_sizes: torch.Tensor) -> torch.Tensor:
        merged = self.patch_merger(self.norm(image_features), image_sizes)
        return linear(self.linear_2, self.act(linear(self.linear_1, merged)))


class Mistral3PreTrainedModel(NativeImageText):
    config: Mistral3Config
    config_class = Mistral3Config


class Mistral3Model(ImageTextModel, Mistral3PreTrainedModel):
    projector_class = Mistral3MultiModalProjector
    output_class = Mistral3ModelOutputWithPast
    image_arguments = ("vision_feature_layer", "image_sizes")
    arguments = (*_INPUTS, "vision_feature_layer", "use_cache", "image_sizes", "mm_encoder_outputs")

    @merge_with_config_defaults
    @can_return_tuple
    def get_image_features(
        self,
        pixel_values: torch.Tensor,
        image_sizes: torch.Tensor | None = None,
        vision_feature_layer: int | list[int] | None = None,
        **kwargs: Any,
    ) -> Any:
        """pixel_values (I, C, height, width), image_sizes (I, 2) -> the tower's output, with the features (N, D) of
        each image. Without image_sizes no image has padding. vision_feature_layer: the layer that they are made of, as
        `hidden_states` counts them."""
        if image_sizes is None:
            image_sizes = torch.tensor([pixel_values.shape[-2:]] * pixel_values.shape[0])
        layer = vision_feature_layer if isinstance(vision_feature_layer, int) else (vision_feature_layer or [-1])[0]
        outputs = self.vision_tower(pixel_values, image_sizes=image_sizes, **with_hidden_states(kwargs, [layer]))
        features = self.multi_modal_projector(outputs.hidden_states[layer].squeeze(0), image_sizes)
        token = self.vision_tower.patch_size * self.config.spatial_merge_size
        outputs.pooler_output = features.split([int(h) // token * (int(w) // token) for h, w in image_sizes])
        return outputs


class Mistral3ForConditionalGeneration(ImageTextHead, Mistral3PreTrainedModel, GenerationMixin):
    backbone_class = Mistral3Model
    output_class = Mistral3CausalLMOutputWithPast
    backbone_arguments = ("pixel_values", "mm_encoder_outputs", "image_sizes", "vision_feature_layer")
    arguments = (*_INPUTS, "labels", "use_cache", "logits_to_keep", "image_sizes", "mm_encoder_outputs")
