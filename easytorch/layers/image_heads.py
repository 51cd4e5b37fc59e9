"""The heads of image encoders: a class of the image."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers.modeling_outputs import ImageClassifierOutput
from transformers.utils.generic import can_return_tuple

from easytorch.layers.encoder_heads import EncoderHead
from easytorch.layers.linear import linear


class ImageClassification(EncoderHead):
    """Logits of each image, from what `features` makes of its tokens. With `config.num_labels` 0, the features."""

    arguments: ClassVar[tuple[str, ...]] = ("pixel_values", "labels", "interpolate_pos_encoding")

    @staticmethod
    def width(config: Any) -> int:
        return config.hidden_size

    def backbone(self) -> nn.Module:
        """The tower under the head."""
        return self.base_model

    def add_head(self, config: Any) -> None:
        labels = config.num_labels
        self.classifier: nn.Module = nn.Linear(self.width(config), labels) if labels > 0 else nn.Identity()

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        """(B, T, D) -> (B, width)"""
        return tokens[:, 0]

    @can_return_tuple
    def forward(
        self, pixel_values: torch.Tensor | None = None, labels: torch.Tensor | None = None, **kwargs: Any
    ) -> ImageClassifierOutput:
        """pixel_values (B, C, height, width). labels: class indices (B,), or floats (B, num_labels) or (B,)."""
        outputs = self.backbone()(pixel_values, return_dict=True, **kwargs)
        logits = linear(self.classifier, self.features(outputs.last_hidden_state))
        return ImageClassifierOutput(
            loss=None if labels is None else self.loss_function(labels, logits, self.config),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class VisionTowerClassification(ImageClassification):
    """Of the vision tower of a model with two: `config.vision_config` is its config."""

    vision_class: ClassVar[type[Any]]

    @staticmethod
    def width(config: Any) -> int:
        return config.vision_config.hidden_size

    def add_backbone(self, config: Any) -> None:
        self.vision_model = self.vision_class._from_config(config.vision_config)

    def backbone(self) -> nn.Module:
        return self.vision_model

    def get_input_embeddings(self) -> nn.Module:
        return self.vision_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.vision_model.set_input_embeddings(value)
