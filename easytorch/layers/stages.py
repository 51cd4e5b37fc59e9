"""A decoder that keeps a part of its layers, as one stage of a pipeline.

What it leaves out passes its input on, so that a forward of the model is a forward of the stage: `inputs_embeds` are
the hidden states of the stage before, and the `logits` of all stages but the last are the hidden states for the next.
Parameters keep their names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from easytorch.layers.decoder import DecoderBackbone


class PassedLayer(nn.Module):
    """Stands for a layer of another stage."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        return hidden_states


def stage_refusal(model: Any) -> str | None:
    """Why a causal language model's layers cannot be divided into stages; None where they can."""
    backbone: Any = model.base_model
    for name in ("forward", "run_layers"):
        if getattr(type(backbone), name, None) is not getattr(DecoderBackbone, name):
            return f"{type(backbone).__name__} does not run its layers one after the other as plain decoders do"
    names = (backbone._input_embed_layer, backbone.layers_name, backbone.norm_name)
    for name, _ in backbone.named_parameters():
        if name.partition(".")[0] not in names:
            return f"{name} belongs to no layer, nor to {names[0]} and {names[2]}"
    if any(one is parameter for one in model.lm_head.parameters() for parameter in backbone.parameters()):
        return f"lm_head and {names[0]} are one tied weight: set tie_word_embeddings to false in the config"
    if getattr(model.config, "output_router_logits", False):
        return "output_router_logits is set, and a load balancing loss needs the routers of all layers"
    return None


def keep_layers(model: Any, first: int, last: int) -> None:
    """Leave out all layers but `first` to `last` (exclusive), and what only the first or the last stage computes."""
    backbone: Any = model.base_model
    layers = getattr(backbone, backbone.layers_name)
    for index in range(len(layers)):
        if not first <= index < last:
            layers[index] = PassedLayer()
    if first > 0:
        _leave_out(backbone, backbone._input_embed_layer)
        backbone.enter = _pass
    if last < len(layers):
        _leave_out(backbone, backbone.norm_name)
        _leave_out(model, "lm_head")
        backbone.leave = model.finish_logits = _pass


def _leave_out(parent: Any, name: str) -> None:
    delattr(parent, name)
    setattr(parent, name, _pass)  # no module: plans of parallelism have nothing to apply to


def _pass(hidden_states: torch.Tensor, *_: Any) -> torch.Tensor:
    return hidden_states
