"""DINOv2 (arXiv:2304.07193): ViT with a scale after each part, and positions that fit every size of image."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Dinov2Config
from transformers import initialization as init
from transformers.masking_utils import create_bidirectional_mask

from easytorch.layers.image_backbone import DinoBackbone, DinoEncoder, DinoFeatures, DinoModel, init_dino
from easytorch.layers.image_heads import ImageClassification
from easytorch.layers.mlp import GatedMLP
from easytorch.layers.patches import masked_tokens, resized_positions
from easytorch.layers.tower import ScaledTowerLayer, TowerMLP
from easytorch.models.vit import ViTAttention, ViTEmbeddings
from easytorch.protocol.native import NativeModel


class Dinov2Embeddings(ViTEmbeddings):
    def add_mask_token(self, config: Any, use_mask_token: bool) -> None:
        self.mask_token = nn.Parameter(torch.zeros(1, config.hidden_size)) if config.use_mask_token else None

    def interpolate_pos_encoding(self, embeddings: torch.Tensor, height: int, width: int) -> torch.Tensor:
        patches = self.patch_embeddings
        wanted = (height // patches.patch_size[0], width // patches.patch_size[1])
        return resized_positions(self.position_embeddings, patches.grid, wanted, torch.float32)

    def forward(  # type: ignore[override]
        self, pixel_values: torch.Tensor, bool_masked_pos: torch.Tensor | None = None
    ) -> torch.Tensor:
        """pixel_values (B, C, height, width) of any size, bool_masked_pos (B, N) -> (B, 1 + N, D)."""
        tokens = masked_tokens(self.patch_embeddings(pixel_values), self.mask_token, bool_masked_pos)
        embeddings = torch.cat((self.cls_token.expand(tokens.shape[0], -1, -1), tokens), dim=1)
        return self.dropout(embeddings + self.interpolate_pos_encoding(embeddings, *pixel_values.shape[-2:]))


class Dinov2Attention(ViTAttention):
    pass


class Dinov2SwiGLUFFN(GatedMLP):
    def __init__(self, config: Any) -> None:
        width = int(int(config.hidden_size * config.mlp_ratio) * 2 / 3)
        super().__init__(config.hidden_size, (width + 7) // 8 * 8, "silu", bias=True)


class Dinov2Layer(ScaledTowerLayer):
    attention_class = Dinov2Attention

    def new_mlp(self, config: Any) -> nn.Module:
        if config.use_swiglu_ffn:
            return Dinov2SwiGLUFFN(config)
        return TowerMLP(config, int(config.hidden_size * config.mlp_ratio))


class Dinov2PreTrainedModel(NativeModel):
    config: Dinov2Config
    config_class = Dinov2Config
    base_model_prefix = "dinov2"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    head_weights = (r"^classifier\.",)
    optional_weights = (r"(^|\.)embeddings\.mask_token$",)
    _input_embed_layer = "patch_embeddings"
    _no_split_modules = ["Dinov2Embeddings", "Dinov2Layer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": Dinov2Layer, "attentions": Dinov2Attention}  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        init_dino(module, self.config)
        if isinstance(module, Dinov2Embeddings):
            for token in (module.position_embeddings, module.cls_token):
                init.trunc_normal_(token, mean=0.0, std=self.config.initializer_range)
            if module.mask_token is not None:
                init.zeros_(module.mask_token)


class Dinov2Encoder(DinoEncoder, Dinov2PreTrainedModel):
    layer_class = Dinov2Layer


class Dinov2Parts(DinoBackbone):
    embeddings_class = Dinov2Embeddings
    encoder_class = Dinov2Encoder

    def context(
        self, hidden_states: torch.Tensor, pixel_values: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> dict[str, Any]:
        mask = create_bidirectional_mask(config=self.config, inputs_embeds=hidden_states, attention_mask=attention_mask)
        return {"attention_mask": mask}


class Dinov2Model(DinoModel, Dinov2Parts, Dinov2PreTrainedModel):
    pass


class Dinov2Backbone(DinoFeatures, Dinov2Parts, Dinov2PreTrainedModel):
    def prefix(self) -> int:
        return 1 if self.config.reshape_hidden_states else 0


class Dinov2ForImageClassification(ImageClassification, Dinov2PreTrainedModel):
    """Image classification from the class token and the mean of the patch states."""

    backbone_class = Dinov2Model
    arguments = ("pixel_values", "labels", "attention_mask")

    @staticmethod
    def width(config: Any) -> int:
        return 2 * config.hidden_size

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.cat((tokens[:, 0], tokens[:, 1:].mean(dim=1)), dim=1)
