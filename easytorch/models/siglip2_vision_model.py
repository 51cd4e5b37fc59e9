"""SigLIP 2's vision tower (arXiv:2502.14786): images of any shape as rows of patches, with padding.

Legend: B batch, N patches of the longest row, D hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Siglip2VisionConfig
from transformers import initialization as init
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from easytorch.layers.linear import linear
from easytorch.layers.norm import LayerNorm
from easytorch.layers.patches import pair
from easytorch.layers.stock_names import given_by
from easytorch.layers.tower import TowerEncoder
from easytorch.models._siglip2_layers import (
    Siglip2EncoderLayer,
    Siglip2MultiheadAttentionPoolingHead,
    Siglip2PreTrainedModel,
)


class Siglip2VisionEmbeddings(nn.Module):
    embed_dim = given_by("config.hidden_size")
    patch_size = given_by("config.patch_size")
    num_patches = given_by("config.num_patches")

    def __init__(self, config: Any) -> None:
        super().__init__()
        rows, columns = pair(config.patch_size)
        side = int(config.num_patches**0.5)
        if config.num_patches < 1 or side**2 != config.num_patches:
            raise ValueError(f"{config.model_type}: config.num_patches={config.num_patches} is no square of an integer")
        self.grid, self.position_embedding_size = (side, side), side
        self.patch_embedding = nn.Linear(config.num_channels * rows * columns, config.hidden_size)
        self.position_embedding = nn.Embedding(config.num_patches, config.hidden_size)

    def positions(self, spatial_shapes: torch.Tensor, length: int) -> torch.Tensor:
        """spatial_shapes (B, 2), rows and columns of each image -> (B, length, D), padded with the first position.

        The table resized bilinearly with antialiasing, as a product, whose shapes do not depend on the images'.
        """
        table = self.position_embedding.weight
        rows, columns = spatial_shapes.to(table.device)[:, :, None].unbind(1)
        if not (torch.compiler.is_compiling() or table.is_meta):  # a graph does not read values
            _check_room(rows, columns, length)
        place = torch.arange(length, device=table.device)[None]
        place = torch.where(place < rows * columns, place, 0)
        down = resize_weights(place // columns, rows, self.grid[0])
        across = resize_weights(place % columns, columns, self.grid[1])
        weights = (down[..., :, None] * across[..., None, :]).flatten(2)
        return (weights @ table.float()).to(table.dtype)

    def forward(self, pixel_values: torch.Tensor, spatial_shapes: torch.Tensor) -> torch.Tensor:
        """pixel_values (B, N, C * patch size**2), spatial_shapes (B, 2) -> (B, N, D)."""
        patches = linear(self.patch_embedding, pixel_values.to(self.patch_embedding.weight.dtype))
        return patches + self.positions(spatial_shapes, pixel_values.shape[1])


def resize_weights(index: torch.Tensor, size: torch.Tensor, side: int) -> torch.Tensor:
    """Weights (B, N, side) that interpolate a row of `side` to `size` (B, 1), at output positions index (B, N).

    Bilinear, with antialiasing where the row gets shorter, as `F.interpolate` (align_corners=False).
    """
    scale = side / size
    centers = ((index + 0.5) * scale)[..., None]
    distance = (torch.arange(side, device=index.device) + 0.5 - centers).abs()
    weights = (1 - distance / scale.clamp(min=1.0)[..., None]).clamp(min=0.0)
    return weights / weights.sum(dim=-1, keepdim=True)


def _check_room(rows: torch.Tensor, columns: torch.Tensor, length: int) -> None:
    for row, column in torch.cat((rows, columns), dim=1).tolist():
        if row < 1 or column < 1 or row * column > length:
            raise ValueError(f"spatial_shapes has {row} x {column} patches; pixel_values has room for {length}")


class Siglip2VisionModel(Siglip2PreTrainedModel):
    config: Siglip2VisionConfig
    config_class = Siglip2VisionConfig
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    base_model_prefix = "vision_model"
    # the other tower of a checkpoint with both, and what compares them
    head_weights = (r"^classifier\.", r"^text_model\.", r"^logit_(scale|bias)$")
    _input_embed_layer = "patch_embedding"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embeddings = Siglip2VisionEmbeddings(config)
        self.encoder = TowerEncoder(config, Siglip2EncoderLayer)
        self.post_layernorm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.use_head = config.vision_use_head
        if self.use_head:
            self.head = Siglip2MultiheadAttentionPoolingHead(config)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Siglip2VisionEmbeddings):
            init.normal_(module.position_embedding.weight, std=self.config.hidden_size**-0.5)

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor,
        pixel_attention_mask: torch.Tensor,
        spatial_shapes: torch.Tensor,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        """pixel_values (B, N, C * patch size**2) -> last_hidden_state (B, N, D), and pooler_output (B, D) by the head.

        pixel_attention_mask (B, N): 0 for padding. spatial_shapes (B, 2): the rows and columns of each image's patches.
        """
        hidden_states = self.embeddings(pixel_values, spatial_shapes)
        mask = create_bidirectional_mask(
            config=self.config, inputs_embeds=hidden_states, attention_mask=pixel_attention_mask
        )
        tokens = self.post_layernorm(self.encoder(hidden_states, mask, **kwargs))
        pooled = self.head(tokens, pixel_attention_mask) if self.use_head else None
        return BaseModelOutputWithPooling(last_hidden_state=tokens, pooler_output=pooled)
