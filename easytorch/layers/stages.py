"""A decoder that keeps a part of its layers, as one stage of a pipeline.

What it leaves out passes its input on, so that a forward of the model is a forward of the stage: `inputs_embeds` are
the hidden states of the stage before, and the `logits` of all stages but the last are the hidden states for the next.
Parameters keep their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from easytorch.layers.decoder import DecoderBackbone

_LEFT_OUT = "_left_out_layers"  # of the model: (parent, name, module) of what another stage has


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
    to_tie = getattr(model, "all_tied_weights_keys", None) or {}  # which `from_pretrained` does when it has loaded them
    if any(one.is_meta and f"lm_head.{name}" in to_tie for name, one in model.lm_head.named_parameters()) or any(
        one is parameter for one in model.lm_head.parameters() for parameter in backbone.parameters()
    ):
        return f"lm_head and {names[0]} are one tied weight: set tie_word_embeddings to false in the config"
    if getattr(model.config, "output_router_logits", False):
        return "output_router_logits is set, and a load balancing loss needs the routers of all layers"
    return None


def keep_layers(model: Any, first: int, last: int) -> None:
    """Leave out all layers but `first` to `last` (exclusive), and what only the first or the last stage computes.

    `restore_layers` undoes it: what is left out is kept without the values of its parameters.
    """
    backbone: Any = model.base_model
    layers = getattr(backbone, backbone.layers_name)
    left_out: list[tuple[nn.Module, str, nn.Module]] = []
    for index, layer in enumerate(layers):
        if not first <= index < last:
            left_out.append((layers, str(index), layer))
            layers[index] = PassedLayer()
    if first > 0:
        left_out.append(_leave_out(backbone, backbone._input_embed_layer))
        backbone.enter = _pass
    if last < len(layers):
        left_out.append(_leave_out(backbone, backbone.norm_name))
        left_out.append(_leave_out(model, "lm_head"))
        backbone.leave = model.finish_logits = _pass
    for _, _, module in left_out:
        _forget(module)
    model.__dict__[_LEFT_OUT] = left_out


def left_out_names(model: Any) -> list[str]:
    """The names in the whole model's state dict of what `keep_layers` has left out; none where it was not called."""
    paths = {id(module): f"{path}." if path else "" for path, module in model.named_modules()}
    return [
        f"{paths[id(parent)]}{name}.{key}"
        for parent, name, module in model.__dict__.get(_LEFT_OUT, ())
        for key in module.state_dict(keep_vars=True)
    ]


def restore_layers(model: Any, state: Mapping[str, torch.Tensor]) -> None:
    """Undo `keep_layers`, with the values of `state`, the whole model's, for what was left out."""
    paths = {id(module): f"{path}." if path else "" for path, module in model.named_modules()}
    device, training = model.device, model.training
    for parent, name, module in model.__dict__.pop(_LEFT_OUT):
        prefix = f"{paths[id(parent)]}{name}."
        own = {key: state[prefix + key].to(device) for key in module.state_dict(keep_vars=True)}
        module.load_state_dict(own, assign=True)
        for part in module.modules():
            if any(one.is_meta for one in part.buffers(recurse=False)):  # a model made on the meta device
                part.to_empty(device=device, recurse=False)
                model._init_weights(part)
        parent.__dict__.pop(name, None)
        parent._modules[name] = module.train(training)
    for owner, names in ((model.base_model, ("enter", "leave")), (model, ("finish_logits",))):
        for name in names:
            owner.__dict__.pop(name, None)


def _leave_out(parent: Any, name: str) -> tuple[nn.Module, str, nn.Module]:
    module = getattr(parent, name)
    delattr(parent, name)
    setattr(parent, name, _pass)  # no module: plans of parallelism have nothing to apply to
    return parent, name, module


def _forget(module: nn.Module) -> None:
    """Free the memory of the parameters."""
    for part in module.modules():
        for name, one in part._parameters.items():
            if one is not None:
                part._parameters[name] = nn.Parameter(one.detach().to("meta"), requires_grad=one.requires_grad)


def _pass(hidden_states: torch.Tensor, *_: Any) -> torch.Tensor:
    return hidden_states
