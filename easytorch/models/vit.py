"""ViT (arXiv:2010.11929): patches of an image as tokens, a class token before them, and learned positions.

Legend: B batch, N patches, T tokens, D hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import ViTConfig
from transformers import initialization as init
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutputWithPooling, MaskedImageModelingOutput
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from easytorch.layers.basics import activation
from easytorch.layers.image_heads import ImageClassification
from easytorch.layers.linear import linear
from easytorch.layers.norm import LayerNorm
from easytorch.layers.patches import (
    check_image_size,
    grid_of,
    masked_tokens,
    pair,
    patch_projection,
    patch_tokens,
    resized_positions,
)
from easytorch.layers.stock_names import given_by
from easytorch.layers.tower import TowerAttention, TowerLayer, TowerMLP, through
from easytorch.protocol.native import NativeModel


class ViTPatchEmbeddings(nn.Module):
    num_channels = given_by("config.num_channels")

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.grid = grid_of(config)
        self.num_patches = self.grid[0] * self.grid[1]
        self.image_size, self.patch_size = pair(config.image_size), pair(config.patch_size)
        self.projection = patch_projection(config)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return patch_tokens(self.projection, pixel_values)


class ViTEmbeddings(nn.Module):
    patch_size = given_by("config.patch_size")
    image_size = given_by("patch_embeddings.image_size")

    def __init__(self, config: Any, use_mask_token: bool = False) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 1, config.hidden_size))
        self.add_mask_token(config, use_mask_token)
        self.patch_embeddings = ViTPatchEmbeddings(config)
        count = self.patch_embeddings.num_patches + 1
        self.position_embeddings = nn.Parameter(torch.randn(1, count, config.hidden_size))
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def add_mask_token(self, config: Any, use_mask_token: bool) -> None:
        self.mask_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size)) if use_mask_token else None

    def interpolate_pos_encoding(self, embeddings: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """The positions (1, 1 + N, D) of an image of so many pixels."""
        patches = self.patch_embeddings
        wanted = (height // patches.patch_size[0], width // patches.patch_size[1])
        return resized_positions(self.position_embeddings, patches.grid, wanted)

    def forward(
        self,
        pixel_values: torch.Tensor,
        bool_masked_pos: torch.Tensor | None = None,
        interpolate_pos_encoding: bool | None = False,
    ) -> torch.Tensor:
        """pixel_values (B, C, height, width), bool_masked_pos (B, N) -> (B, 1 + N, D)."""
        tokens = masked_tokens(self.patch_embeddings(pixel_values), self.mask_token, bool_masked_pos)
        embeddings = torch.cat((self.cls_token.expand(tokens.shape[0], -1, -1), tokens), dim=1)
        if interpolate_pos_encoding:
            positions = self.interpolate_pos_encoding(embeddings, *pixel_values.shape[-2:])
        else:
            check_image_size(pixel_values, self.patch_embeddings.image_size)
            positions = self.position_embeddings
        return self.dropout(embeddings + positions)


class ViTAttention(TowerAttention):
    output_name = "o_proj"
    dropout_rate = "attention_probs_dropout_prob"

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx, bias=config.qkv_bias)


class ViTLayer(TowerLayer):
    norms = ("layernorm_before", "layernorm_after")

    def add_modules(self, config: Any, layer_idx: int) -> None:
        self.attention = ViTAttention(config, layer_idx)
        self.layernorm_before = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.layernorm_after = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = TowerMLP(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def after_attention(self, attended: torch.Tensor) -> torch.Tensor:
        return self.dropout(attended)

    def after_mlp(self, output: torch.Tensor) -> torch.Tensor:
        return self.dropout(output)


class ViTPooler(nn.Module):
    """act(dense(x of the first token)): (B, T, D) -> (B, pooler size)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.pooler_output_size)
        self.activation = activation(config.pooler_act)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.activation(linear(self.dense, hidden_states[:, 0]))


class ViTPreTrainedModel(NativeModel):
    config: ViTConfig
    config_class = ViTConfig
    base_model_prefix = "vit"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    optional_weights = (r"(^|\.)pooler\.", r"(^|\.)embeddings\.mask_token$")
    head_weights = (r"^(classifier|decoder)\.",)
    _input_embed_layer = "patch_embeddings"
    _no_split_modules = ["ViTEmbeddings", "ViTLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": ViTLayer, "attentions": ViTAttention}  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ViTEmbeddings):
            for token in (module.position_embeddings, module.cls_token):
                init.trunc_normal_(token, mean=0.0, std=self.config.initializer_range)
            if module.mask_token is not None:
                init.zeros_(module.mask_token)


class ViTModel(ViTPreTrainedModel):
    has_pooler = True

    def __init__(self, config: ViTConfig, add_pooling_layer: bool = True, use_mask_token: bool = False) -> None:
        super().__init__(config)
        self.embeddings = ViTEmbeddings(config, use_mask_token)
        self.layers = nn.ModuleList(ViTLayer(config, index) for index in range(config.num_hidden_layers))
        self.layernorm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.pooler = ViTPooler(config) if add_pooling_layer else None
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        bool_masked_pos: torch.Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        """pixel_values (B, C, height, width) -> last_hidden_state (B, 1 + N, D), and pooler_output.

        bool_masked_pos (B, N): the patches that the mask token stands for. attention_mask (B, 1 + N): 1 for tokens
        that are attended to.
        """
        hidden_states = self.embeddings(pixel_values, bool_masked_pos, interpolate_pos_encoding)
        mask = create_bidirectional_mask(config=self.config, inputs_embeds=hidden_states, attention_mask=attention_mask)
        tokens = self.layernorm(through(self.layers, hidden_states, mask, **kwargs))
        pooled = None if self.pooler is None else self.pooler(tokens)
        return BaseModelOutputWithPooling(last_hidden_state=tokens, pooler_output=pooled)


class ViTForMaskedImageModeling(ViTPreTrainedModel):
    """The pixels of patches, those that are masked among them (SimMIM, arXiv:2111.09886)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.vit = ViTModel(config, add_pooling_layer=False, use_mask_token=True)
        pixels = config.encoder_stride**2 * config.num_channels
        self.decoder = nn.Sequential(
            nn.Conv2d(config.hidden_size, pixels, kernel_size=1), nn.PixelShuffle(config.encoder_stride)
        )
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        bool_masked_pos: torch.Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedImageModelingOutput:
        """pixel_values (B, C, height, width) -> reconstruction of the same shape; a loss where patches are masked."""
        patch = pair(self.config.patch_size)
        if bool_masked_pos is not None and patch != pair(self.config.encoder_stride):
            raise ValueError(
                f"bool_masked_pos needs patches of the size that the head makes: config.patch_size="
                f"{self.config.patch_size}, config.encoder_stride={self.config.encoder_stride}"
            )
        outputs = self.vit(
            pixel_values,
            bool_masked_pos=bool_masked_pos,
            interpolate_pos_encoding=interpolate_pos_encoding,
            attention_mask=attention_mask,
            return_dict=True,
            **kwargs,
        )
        tokens = outputs.last_hidden_state[:, 1:]
        assert pixel_values is not None
        height, width = (size // one for size, one in zip(pixel_values.shape[-2:], patch, strict=True))
        reconstruction = self.decoder(tokens.transpose(1, 2).unflatten(2, (height, width)))
        loss = None
        if bool_masked_pos is not None:
            mask = bool_masked_pos.reshape(-1, 1, height, width)
            mask = mask.repeat_interleave(patch[0], 2).repeat_interleave(patch[1], 3)
            difference = (pixel_values - reconstruction).abs() * mask
            loss = difference.sum() / (mask.sum() + 1e-5) / self.config.num_channels
        return MaskedImageModelingOutput(
            loss=loss,
            reconstruction=reconstruction,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class ViTForImageClassification(ImageClassification, ViTPreTrainedModel):
    backbone_class = ViTModel
    arguments = (*ImageClassification.arguments, "attention_mask")
