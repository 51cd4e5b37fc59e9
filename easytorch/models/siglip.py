"""SigLIP (arXiv:2303.15343): CLIP's two towers, where each pair of a text and an image is a case of its own."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.models.siglip.modeling_siglip import SiglipOutput

from easytorch.layers.image_heads import VisionTowerClassification
from easytorch.layers.two_towers import TwoTowers
from easytorch.models._siglip_layers import SiglipPreTrainedModel
from easytorch.models.siglip_text_model import SiglipTextModel
from easytorch.models.siglip_vision_model import SiglipVisionModel


class SiglipTwoTowers(TwoTowers):
    """Logits with a scale and a bias, and a sigmoid for each pair."""

    def add_head(self, config: Any) -> None:
        self.logit_scale = nn.Parameter(torch.randn(1))
        self.logit_bias = nn.Parameter(torch.randn(1))

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:
            init.zeros_(self.logit_scale)
            init.zeros_(self.logit_bias)

    def logits(self, similarity: torch.Tensor) -> torch.Tensor:
        scale, bias = self.logit_scale.to(similarity.device), self.logit_bias.to(similarity.device)
        return similarity * scale.exp() + bias

    def loss_of(self, logits_per_text: torch.Tensor) -> torch.Tensor:
        belongs = 2 * torch.eye(logits_per_text.shape[0], device=logits_per_text.device) - 1
        return -F.logsigmoid(belongs * logits_per_text).sum(dim=-1).mean()


class SiglipClassification(VisionTowerClassification):
    """Image classification from the mean of the patch states."""

    main_input_name = "pixel_values"
    input_modalities: Any = ("image",)
    head_weights: ClassVar[tuple[str, ...]] = (r"^classifier\.", r"^text_model\.", r"^logit_(scale|bias)$")

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self and isinstance(self.classifier, nn.Linear):
            std = self.width(self.config) ** -0.5 * self.config.initializer_factor
            init.normal_(self.classifier.weight, std=std)

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens.mean(dim=1)


class SiglipModel(SiglipTwoTowers, SiglipPreTrainedModel):
    text_class = SiglipTextModel
    vision_class = SiglipVisionModel
    output_class = SiglipOutput


class SiglipForImageClassification(SiglipClassification, SiglipPreTrainedModel):
    vision_class = SiglipVisionModel
    arguments = ("pixel_values", "labels", "interpolate_pos_encoding")
