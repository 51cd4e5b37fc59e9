"""LLaVA (arXiv:2304.08485, 2310.03744): a decoder that reads the patches of images as tokens, through a small MLP.

The tower and the decoder are of any family: CLIP and Llama in LLaVA 1.5, Pixtral's tower and Mistral in Pixtral.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationMixin, LlavaConfig
from transformers.models.llava.modeling_llava import LlavaCausalLMOutputWithPast, LlavaModelOutputWithPast
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults

from easytorch.cache_names import CACHE
from easytorch.layers.basics import activation
from easytorch.layers.image_text import ImageTextHead, ImageTextModel, record_hidden_states, with_hidden_states
from easytorch.layers.linear import linear
from easytorch.protocol.native import NativeImageText

_OF_IMAGES = ("vision_feature_layer", "vision_feature_select_strategy", "image_sizes")


class LlavaMultiModalProjector(torch.nn.Module):
    """linear_2(act(linear_1(x))): (..., N, features of the tower's layers) -> (..., N, D)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        layers = config.vision_feature_layer
        width = config.vision_config.hidden_size * (1 if isinstance(layers, int) else len(layers))
        hidden, bias = config.text_config.hidden_size, config.multimodal_projector_bias
        self.linear_1 = torch.nn.Linear(width, hidden, bias=bias)
        self.act = activation(config.projector_hidden_act)
        self.linear_2 = torch.nn.Linear(hidden, hidden, bias=bias)

    def forward(self, image_features: torch.Tensor) -> torch.Tensor:
        return linear(self.linear_2, self.act(linear(self.linear_1, image_features)))


class LlavaPreTrainedModel(NativeImageText):
    config: LlavaConfig
    config_class = LlavaConfig


class LlavaModel(ImageTextModel, LlavaPreTrainedModel):
    projector_class = LlavaMultiModalProjector
    output_class = LlavaModelOutputWithPast
    image_arguments = _OF_IMAGES
    asks_tower = True
    arguments = (
        "input_ids",
        "pixel_values",
        "attention_mask",
        "position_ids",
        CACHE,
        "inputs_embeds",
        *_OF_IMAGES,
        "mm_encoder_outputs",
    )

    def add_parts(self, config: Any) -> None:
        super().add_parts(config)
        record_hidden_states(self.vision_tower)

    @merge_with_config_defaults
    @can_return_tuple
    def get_image_features(
        self,
        pixel_values: torch.Tensor,
        vision_feature_layer: int | list[int] | None = None,
        vision_feature_select_strategy: str | None = None,
        image_sizes: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """pixel_values (I, C, height, width) -> the tower's output, with the features (N, D) of each image.

        vision_feature_layer: the layer, or layers, of the tower that they are made of, as `hidden_states` counts them.
        vision_feature_select_strategy: "default" leaves the class token out, "full" keeps it. image_sizes (I, 2): the
        pixels of each image, for towers that take images of any size in one row (Pixtral).
        """
        if image_sizes is not None:
            kwargs["image_sizes"] = image_sizes
        layers = [vision_feature_layer] if isinstance(vision_feature_layer, int) else vision_feature_layer or []
        outputs = self.vision_tower(pixel_values, **with_hidden_states(kwargs, layers))
        first = int(vision_feature_select_strategy == "default")
        states = [outputs.hidden_states[layer][:, first:] for layer in layers]
        features = self.multi_modal_projector(torch.cat(states, dim=-1) if len(states) > 1 else states[0])
        if image_sizes is None:
            outputs.pooler_output = list(features)
        else:
            sizes = torch.as_tensor(image_sizes, device=features.device) // self.vision_tower.patch_size
            outputs.pooler_output = torch.split(features.squeeze(0), sizes.prod(dim=-1).tolist())
        return outputs


class LlavaForConditionalGeneration(ImageTextHead, LlavaPreTrainedModel, GenerationMixin):
    backbone_class = LlavaModel
    output_class = LlavaCausalLMOutputWithPast
    backbone_arguments = ("pixel_values", "mm_encoder_outputs", *_OF_IMAGES)
    arguments = (
        "input_ids",
        "pixel_values",
        "attention_mask",
        "position_ids",
        CACHE,
        "inputs_embeds",
        "vision_feature_layer",
        "vision_feature_select_strategy",
        "labels",
        "logits_to_keep",
        "image_sizes",
        "mm_encoder_outputs",
    )
