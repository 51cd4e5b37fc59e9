"""CLIP (arXiv:2103.00020): a text and a vision tower, and how much each text is like each image."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.clip.modeling_clip import CLIPOutput

from easytorch.layers.image_heads import VisionTowerClassification
from easytorch.layers.linear import linear
from easytorch.layers.two_towers import TwoTowers
from easytorch.models._clip_layers import CLIPPreTrainedModel, init_weight
from easytorch.models.clip_text_model import CLIPTextModel
from easytorch.models.clip_vision_model import CLIPVisionModel


class CLIPModel(TwoTowers, CLIPPreTrainedModel):
    text_class = CLIPTextModel
    vision_class = CLIPVisionModel
    output_class = CLIPOutput

    def add_head(self, config: Any) -> None:
        self.projection_dim = config.projection_dim
        self.text_embed_dim, self.vision_embed_dim = config.text_config.hidden_size, config.vision_config.hidden_size
        self.visual_projection = nn.Linear(config.vision_config.hidden_size, config.projection_dim, bias=False)
        self.text_projection = nn.Linear(config.text_config.hidden_size, config.projection_dim, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(config.logit_scale_init_value))

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:
            for projection in (self.text_projection, self.visual_projection):
                init_weight(projection, projection.in_features**-0.5 * self.config.initializer_factor)

    def text_embeds(self, pooled: torch.Tensor) -> torch.Tensor:
        return linear(self.text_projection, pooled)

    def image_embeds(self, pooled: torch.Tensor) -> torch.Tensor:
        return linear(self.visual_projection, pooled)

    def logits(self, similarity: torch.Tensor) -> torch.Tensor:
        return similarity * self.logit_scale.exp().to(similarity.device)

    def loss_of(self, logits_per_text: torch.Tensor) -> torch.Tensor:
        right = torch.arange(len(logits_per_text), device=logits_per_text.device)
        return (F.cross_entropy(logits_per_text, right) + F.cross_entropy(logits_per_text.t(), right)) / 2.0


class CLIPForImageClassification(VisionTowerClassification, CLIPPreTrainedModel):
    """Image classification from the mean of the patch states."""

    vision_class = CLIPVisionModel
    head_weights = (*CLIPPreTrainedModel.head_weights, r"^text_model\.", r"^logit_scale$")
    arguments = ("pixel_values", "labels")
    main_input_name = "pixel_values"
    input_modalities = ("image",)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:
            init_weight(self.classifier, self.width(self.config) ** -0.5 * self.config.initializer_factor)

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens[:, 1:].mean(dim=1)
