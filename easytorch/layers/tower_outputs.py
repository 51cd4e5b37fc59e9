"""What an output says of the towers beside the decoder, in the fields that the installed transformers has for it.

transformers 5.23 has their features, `image_hidden_states` and `audio_hidden_states`, in some classes; 5.24 has the
outputs of the towers, `image_outputs`, `video_outputs` and `audio_outputs`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from transformers import modeling_outputs
from transformers.modeling_outputs import ModelOutput

_ASKING = ("output_attentions", "output_hidden_states")
_WITH_TOWERS = {
    "BaseModelOutputWithPast": "MultimodalBaseModelOutputWithPast",
    "CausalLMOutputWithPast": "MultimodalCausalLMOutputWithPast",
    "MoeModelOutputWithPast": "MultimodalMoeBaseModelOutputWithPast",
    "MoeCausalLMOutputWithPast": "MultimodalMoeCausalLMOutputWithPast",
}


def with_towers(output_class: type[ModelOutput], model_type: str | None = None) -> type[ModelOutput]:
    """The output of a decoder with fields for its towers; `output_class` itself where transformers has none.

    A subclass of it that transformers' file of `model_type` defines, with properties of the family's own, comes first.
    """
    found: type[ModelOutput] = getattr(modeling_outputs, _WITH_TOWERS.get(output_class.__name__, ""), output_class)
    if model_type is None or found is output_class:
        return found
    file = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    own = (one for one in vars(file).values() if isinstance(one, type) and one.__module__ == file.__name__)
    return next((one for one in own if issubclass(one, found)), found)


def asked_of_towers(output_class: type[ModelOutput], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a call that ask for more outputs, for the towers, where those of `output_class` have theirs."""
    shown = any(name.endswith("_outputs") for name in _fields(output_class))
    return {name: kwargs[name] for name in _ASKING if name in kwargs} if shown else {}


def tower_fields(
    output_class: type[ModelOutput], outputs: Mapping[str, Any], features: Mapping[str, torch.Tensor | None]
) -> dict[str, Any]:
    """The fields of an output of `output_class`. outputs, features: of each kind of input ("image", "video", "audio"),
    the tower's output and what stands in place of the tokens."""
    names = _fields(output_class)
    given = {f"{kind}_outputs": one for kind, one in outputs.items()}
    given |= {f"{kind}_hidden_states": one for kind, one in features.items()}
    return {name: value for name, value in given.items() if name in names}


def _fields(output_class: Any) -> Mapping[str, Any]:
    """By name; torch.compile does not trace `dataclasses.fields` of a class."""
    found: Mapping[str, Any] = output_class.__dataclass_fields__
    return found
