"""SigLIP 2 (arXiv:2502.14786): SigLIP, whose images have any shape."""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_outputs import ImageClassifierOutput
from transformers.models.siglip2.modeling_siglip2 import Siglip2Output
from transformers.utils.generic import can_return_tuple

from easytorch.layers.linear import linear
from easytorch.models._siglip2_layers import Siglip2PreTrainedModel
from easytorch.models.siglip import SiglipClassification, SiglipTwoTowers
from easytorch.models.siglip2_text_model import Siglip2TextModel
from easytorch.models.siglip2_vision_model import Siglip2VisionModel


class Siglip2Model(SiglipTwoTowers, Siglip2PreTrainedModel):
    text_class = Siglip2TextModel
    vision_class = Siglip2VisionModel
    output_class = Siglip2Output
    arguments = (
        "input_ids",
        "pixel_values",
        "pixel_attention_mask",
        "spatial_shapes",
        "attention_mask",
        "position_ids",
        "return_loss",
    )
    of_images = ("pixel_attention_mask", "spatial_shapes")


class Siglip2ForImageClassification(SiglipClassification, Siglip2PreTrainedModel):
    vision_class = Siglip2VisionModel

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        pixel_attention_mask: torch.Tensor | None = None,
        spatial_shapes: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> ImageClassifierOutput:
        """Inputs as `Siglip2VisionModel.forward`. labels: class indices (B,), or floats (B, num_labels) or (B,)."""
        outputs = self.vision_model(pixel_values, pixel_attention_mask, spatial_shapes, return_dict=True, **kwargs)
        tokens = outputs.last_hidden_state
        if pixel_attention_mask is None:
            features = self.features(tokens)
        else:
            real = pixel_attention_mask[..., None].to(tokens.device)
            features = (tokens * real).sum(dim=1) / real.sum(dim=1)
        logits = linear(self.classifier, features)
        return ImageClassifierOutput(
            loss=None if labels is None else self.loss_function(labels, logits, self.config),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
