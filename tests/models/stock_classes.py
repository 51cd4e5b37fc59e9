"""transformers' classes that ours are compared with."""

from __future__ import annotations

import functools
from dataclasses import fields
from typing import Any

import torch
import transformers
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.llama4 import modeling_llama4

FIELD = "image_outputs"


class Llama4ForConditionalGeneration(transformers.Llama4ForConditionalGeneration):
    """The class of transformers 5.24.0 fails at every call: it reads `image_outputs` of its decoder's outputs, which
    have none. Here they have what the tower gave, with the features that stand in place of the image's tokens.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.seen: Any = None
        self.language_model.register_forward_hook(self.add_images)

    def get_image_features(self, pixel_values: torch.Tensor, **kwargs: Any) -> Any:
        self.seen = super().get_image_features(pixel_values, **kwargs)
        return self.seen

    @functools.wraps(transformers.Llama4ForConditionalGeneration.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = (kwargs.get("mm_encoder_outputs") or {}).get("image")
        return super().forward(*args, **kwargs)

    def add_images(self, decoder: torch.nn.Module, args: Any, outputs: Any) -> None:
        if self.seen is not None:
            self.seen.pooler_output = self.multi_modal_projector(self.seen.last_hidden_state)
        setattr(outputs, FIELD, self.seen)


def stock(name: str) -> Any:
    """transformers' class of that name, or one that works in its place."""
    of_images, of_decoder = (
        {field.name for field in fields(one)}
        for one in (modeling_llama4.Llama4CausalLMOutputWithPast, MoeCausalLMOutputWithPast)
    )
    if name == "Llama4ForConditionalGeneration" and FIELD in of_images - of_decoder:
        return Llama4ForConditionalGeneration
    return getattr(transformers, name)
