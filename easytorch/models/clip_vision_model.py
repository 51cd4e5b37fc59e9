"""CLIP's vision tower (arXiv:2103.00020): ViT with a norm before its layers, and none after but of the class token."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import CLIPVisionConfig
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.clip.modeling_clip import CLIPVisionModelOutput
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from easytorch.layers.linear import linear
from easytorch.layers.norm import LayerNorm
from easytorch.layers.patches import (
    check_image_size,
    grid_of,
    pair,
    patch_projection,
    patch_tokens,
    resized_positions,
)
from easytorch.layers.stock_names import given_by
from easytorch.layers.tower import TowerEncoder
from easytorch.models._clip_layers import CLIPEncoderLayer, CLIPPreTrainedModel, init_weight


class CLIPVisionEmbeddings(nn.Module):
    embed_dim = given_by("config.hidden_size")
    image_size = given_by("config.image_size")
    num_positions = given_by("position_embedding.num_embeddings")
    position_ids: torch.Tensor
    has_class_token = True
    patch_bias = False

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.grid, self.patch_size = grid_of(config), config.patch_size
        if self.has_class_token:
            self.class_embedding = nn.Parameter(torch.randn(config.hidden_size))
        self.patch_embedding = patch_projection(config, bias=self.patch_bias)
        count = self.grid[0] * self.grid[1] + self.has_class_token
        self.position_embedding = nn.Embedding(count, config.hidden_size)
        self.register_buffer("position_ids", torch.arange(count)[None], persistent=False)

    @property
    def num_patches(self) -> int:
        return self.grid[0] * self.grid[1]

    def init_buffers(self) -> None:
        """Fill the buffer after a load on the meta device."""
        init.copy_(self.position_ids, torch.arange(self.position_ids.shape[-1])[None])

    def interpolate_pos_encoding(self, embeddings: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """The positions (1, T, D) of an image of so many pixels."""
        rows, columns = pair(self.patch_size)
        wanted = (height // rows, width // columns)
        return resized_positions(self.position_embedding.weight[None], self.grid, wanted)

    def forward(self, pixel_values: torch.Tensor, interpolate_pos_encoding: bool | None = False) -> torch.Tensor:
        """pixel_values (B, C, height, width) -> (B, T, D)."""
        embeddings = patch_tokens(self.patch_embedding, pixel_values)
        if self.has_class_token:
            first = self.class_embedding.expand(embeddings.shape[0], 1, -1)
            embeddings = torch.cat((first, embeddings), dim=1)
        if interpolate_pos_encoding:
            return embeddings + self.interpolate_pos_encoding(embeddings, *pixel_values.shape[-2:])
        check_image_size(pixel_values, self.config.image_size)
        return embeddings + self.position_embedding(self.position_ids)  # called: hooks may bring its weight


class CLIPVisionPreTrainedModel(CLIPPreTrainedModel):
    config: CLIPVisionConfig
    config_class = CLIPVisionConfig
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    # the other tower of a checkpoint with both, and what compares them
    head_weights = (*CLIPPreTrainedModel.head_weights, r"^text_model\.", r"^logit_scale$")

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, CLIPVisionEmbeddings):
            factor, config = self.config.initializer_factor, module.config
            init.normal_(module.class_embedding, mean=0.0, std=config.hidden_size**-0.5 * factor)
            init_weight(module.patch_embedding, config.initializer_range * factor)
            init_weight(module.position_embedding, config.initializer_range * factor)
            module.init_buffers()


class CLIPVisionModel(CLIPVisionPreTrainedModel):
    _input_embed_layer = "patch_embedding"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embeddings = CLIPVisionEmbeddings(config)
        self.pre_layrnorm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.encoder = TowerEncoder(config, CLIPEncoderLayer)
        self.post_layernorm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        interpolate_pos_encoding: bool | None = False,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        """pixel_values (B, C, height, width) -> last_hidden_state (B, 1 + N, D), pooler_output (B, D)."""
        hidden_states = self.pre_layrnorm(self.embeddings(pixel_values, interpolate_pos_encoding))
        tokens = self.encoder(hidden_states, **kwargs)
        return BaseModelOutputWithPooling(last_hidden_state=tokens, pooler_output=self.post_layernorm(tokens[:, 0]))


class CLIPVisionModelWithProjection(CLIPVisionPreTrainedModel):
    """The image in the space that it has in common with texts."""

    base_model_prefix = "vision_model"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.vision_model = CLIPVisionModel._from_config(config)
        self.visual_projection = nn.Linear(config.hidden_size, config.projection_dim, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:
            init_weight(self.visual_projection, self.config.hidden_size**-0.5 * self.config.initializer_factor)

    def get_input_embeddings(self) -> nn.Module:
        return self.vision_model.embeddings.patch_embedding

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        **kwargs: Any,
    ) -> CLIPVisionModelOutput:
        """As `CLIPVisionModel.forward` -> image_embeds (B, E), last_hidden_state (B, 1 + N, D)."""
        outputs = self.vision_model(
            pixel_values, interpolate_pos_encoding=interpolate_pos_encoding, return_dict=True, **kwargs
        )
        return CLIPVisionModelOutput(
            image_embeds=linear(self.visual_projection, outputs.pooler_output),
            last_hidden_state=outputs.last_hidden_state,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
