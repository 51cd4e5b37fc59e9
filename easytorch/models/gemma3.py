"""Gemma 3 with images (arXiv:2503.19786): its decoder over SigLIP's tower; the tokens of an image see one another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import Cache, Gemma3Config, GenerationMixin, PreTrainedConfig
from transformers import initialization as init
from transformers.models.gemma3.modeling_gemma3 import (
    Gemma3CausalLMOutputWithPast,
    Gemma3ModelOutputWithPast,
    create_masks_for_vision_model,
    get_block_sequence_ids_for_mask,
)
from transformers.utils.generic import can_return_tuple

from easytorch.cache_names import CACHE
from easytorch.layers.arguments import ArgumentsInOrder
from easytorch.layers.heads import SequenceClassificationHead
from easytorch.layers.image_text import ImageTextHead, ImageTextModel, TokenTypesOfPrompt
from easytorch.layers.masks import Masks, masks_by_layer_type
from easytorch.layers.norm import ZeroCenteredRMSNorm
from easytorch.layers.stock_names import given_by, same_as
from easytorch.protocol.native import NativeImageText

_INPUTS = (
    "input_ids",
    "pixel_values",
    "attention_mask",
    "position_ids",
    CACHE,
    "token_type_ids",
    "inputs_embeds",
    "labels",
)


class Gemma3MultiModalProjector(nn.Module):
    """The mean of each square of patches, normalised and projected: (I, patches, tower's) -> (I, N, D)."""

    kernel_size = same_as("pooled")

    def __init__(self, config: Any) -> None:
        super().__init__()
        vision, tokens = config.vision_config, config.mm_tokens_per_image
        self.mm_input_projection_weight = nn.Parameter(torch.zeros(vision.hidden_size, config.text_config.hidden_size))
        self.mm_soft_emb_norm = ZeroCenteredRMSNorm(vision.hidden_size, eps=vision.layer_norm_eps)
        self.patches_per_image = vision.image_size // vision.patch_size
        self.tokens_per_image = tokens
        self.tokens_per_side = max(int(tokens**0.5), 1)
        self.pooled = self.patches_per_image // self.tokens_per_side  # patches of a token's side
        self.avg_pool = nn.AvgPool2d(kernel_size=self.pooled, stride=self.pooled)

    def forward(self, vision_outputs: torch.Tensor) -> torch.Tensor:
        if self.pooled < 1:  # here, as in transformers such a config still carries text
            raise ValueError(
                f"gemma3: config.mm_tokens_per_image={self.tokens_per_image} is more tokens than the "
                f"{self.patches_per_image} x {self.patches_per_image} patches of an image"
            )
        patches = vision_outputs.transpose(1, 2).unflatten(2, (self.patches_per_image, self.patches_per_image))
        pooled = self.avg_pool(patches.contiguous()).flatten(2).transpose(1, 2)
        return torch.matmul(self.mm_soft_emb_norm(pooled), self.mm_input_projection_weight).type_as(vision_outputs)


class Gemma3PreTrainedModel(NativeImageText):
    config: Gemma3Config
    config_class = Gemma3Config

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Gemma3MultiModalProjector):
            init.zeros_(module.mm_input_projection_weight)


def masks_with_images(
    config: PreTrainedConfig,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | Mapping[str, Any] | None,
    cache: Cache | None,
    position_ids: torch.Tensor | None,
    token_type_ids: torch.Tensor | None,
) -> Masks:
    """The masks by type of layer. token_type_ids (B, T): 1 for tokens of images, each of which sees itself whole."""
    if token_type_ids is None or isinstance(attention_mask, Mapping):
        return masks_by_layer_type(config, config.layer_types, inputs_embeds, attention_mask, cache, position_ids)
    blocks = get_block_sequence_ids_for_mask(token_type_ids, device=inputs_embeds.device)
    masks: Masks = create_masks_for_vision_model(
        config, inputs_embeds, attention_mask, cache, position_ids, block_sequence_ids=blocks
    )
    return masks


class Gemma3Model(ImageTextModel, Gemma3PreTrainedModel):
    vocab_size = given_by("config.text_config.vocab_size")
    projector_class = Gemma3MultiModalProjector
    output_class = Gemma3ModelOutputWithPast
    mask_arguments = ("token_type_ids",)
    arguments = (*_INPUTS, "use_cache", "mm_encoder_outputs")
    accepts_loss_kwargs = False

    @can_return_tuple
    def get_image_features(self, pixel_values: torch.Tensor, **kwargs: Any) -> Any:
        """pixel_values (I, C, height, width) -> the tower's output, with the features (I, N, D) as pooler_output."""
        outputs = self.vision_tower(pixel_values=pixel_values, return_dict=True, **kwargs)
        outputs.pooler_output = self.multi_modal_projector(outputs.last_hidden_state)
        return outputs

    def make_masks(
        self,
        inputs_embeds: torch.Tensor,
        attention_mask: Any,
        cache: Cache | None,
        position_ids: torch.Tensor | None,
        token_type_ids: torch.Tensor | None = None,
    ) -> Masks:
        text = self.config.get_text_config()
        return masks_with_images(text, inputs_embeds, attention_mask, cache, position_ids, token_type_ids)


class Gemma3ForConditionalGeneration(ImageTextHead, TokenTypesOfPrompt, Gemma3PreTrainedModel, GenerationMixin):
    backbone_class = Gemma3Model
    output_class = Gemma3CausalLMOutputWithPast
    masks_of_types = staticmethod(masks_with_images)
    backbone_arguments = ("pixel_values", "token_type_ids", "mm_encoder_outputs")
    arguments = (*_INPUTS, "use_cache", "logits_to_keep", "mm_encoder_outputs")


class Gemma3ForSequenceClassification(ArgumentsInOrder, SequenceClassificationHead, Gemma3PreTrainedModel):
    backbone_class = Gemma3Model
    arguments = _INPUTS
