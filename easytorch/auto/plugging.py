"""Which class is native, and what transformers' own are given: our attention where they can have it, and the bridge.

transformers accepts any registered attention name for any class. A class that computes attention by itself ignores it
(bloom, mpt, deberta-v2), yet takes its mask from the name, which then is not the one its code expects: wrong numbers
without an error. So a class is read before it is given our name.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from easytorch.bridge.families import families
from easytorch.layers.attention import FLASH_FOR_TRANSFORMERS, INTERFACES
from easytorch.protocol.bridge import BridgeMixin
from easytorch.protocol.native import NativeModel

ModelClass = type[PreTrainedModel]

_BRIDGE = [name for name in vars(BridgeMixin) if not name.startswith("_")]


def native_class(model_class: ModelClass) -> ModelClass:
    """Our class for one of transformers' own: that of the same name in the family's file, or the class itself."""
    family = getattr(model_class.config_class, "model_type", "")
    if not model_class.__module__.startswith("transformers.") or family not in families():
        return model_class
    return getattr(importlib.import_module(f"easytorch.models.{family}"), model_class.__name__, model_class)


def attention_for(
    model_class: ModelClass, config: PreTrainedConfig, asked: str | dict[str, str] | None, wants_weights: bool
) -> tuple[str | dict[str, str] | None, str | None]:
    """The `attn_implementation` to load with, None for transformers' own choice, and why when that is not ours.

    wants_weights: the config is to say output_attentions=True, which transformers takes with "eager" alone.
    `ValueError` when ours was asked for by name and `model_class` cannot take it.
    """
    if issubclass(model_class, NativeModel):
        return asked or _of_config(config) or ("eager" if wants_weights else "easytorch"), None
    if asked is None and _of_config(config) in INTERFACES:  # transformers writes its choice into the config it is given
        asked = _of_config(config)
    if asked is None and wants_weights:
        return None, "output_attentions=True in the config makes transformers take its own eager attention"
    if asked is None and _of_config(config) is None:
        return _automatic(model_class, config)
    if asked not in INTERFACES:
        return asked, f"attn_implementation={asked or _of_config(config)!r} was asked for"
    refusal = refusal_of(model_class)
    if refusal is not None:
        raise ValueError(
            f"attn_implementation={asked!r} cannot be obeyed: {refusal}; leave it out, or use transformers' "
            f"own 'eager' or 'sdpa'"
        )
    return FLASH_FOR_TRANSFORMERS if asked == "flash" else asked, None


def refusal_of(model_class: ModelClass) -> str | None:
    """None when the attention of `model_class` can be ours, else the reason why not."""
    name, code = model_class.__name__, _source(model_class.__module__)
    has_attention = re.search(r"^class \w*Attention\w*\(", code, re.MULTILINE)
    if has_attention and "ALL_ATTENTION_FUNCTIONS" not in code:
        return f"{name} computes attention by itself and never calls transformers' AttentionInterface"
    if re.search(r'_attn_implementation in \("eager", "sdpa"\)', code):
        return f"{name} puts part of its attention into the mask for transformers' eager and sdpa only"
    if not (model_class._supports_sdpa or model_class._supports_attention_backend or model_class._supports_flash_attn):
        if not has_attention:
            return f"{name} has no attention that could be replaced"
        return f"{name} takes no attention but transformers' eager: its code needs that one's mask"
    return None


def plug_bridge(model: PreTrainedModel) -> PreTrainedModel:
    """Gives transformers' own class of `model`, once loaded here, what native ones have: `to_flax` and its kin."""
    for name in _BRIDGE:
        if not hasattr(type(model), name):
            setattr(type(model), name, vars(BridgeMixin)[name])
    return model


def _automatic(model_class: ModelClass, config: PreTrainedConfig) -> tuple[dict[str, str] | None, str | None]:
    """Ours for the model and for each model inside it that can have it; None for the others leaves the choice open."""
    refusals = {"": refusal_of(model_class)}
    for key in config.sub_configs:
        inner = getattr(config, key, None)
        if inner is not None and type(inner) in transformers.AutoModel._model_mapping:
            found: Any = transformers.AutoModel._model_mapping[type(inner)]
            refusals[key] = refusal_of(found[0] if isinstance(found, tuple) else found)
    reason = "; ".join(dict.fromkeys(filter(None, refusals.values()))) or None
    chosen = {key: "easytorch" for key, refusal in refusals.items() if refusal is None}
    return chosen or None, reason


def _of_config(config: PreTrainedConfig) -> str | None:
    """What the config object itself asks for. "sdpa" is what transformers leaves there when nobody asks."""
    return None if config._attn_implementation in (None, "sdpa") else config._attn_implementation


@functools.cache
def _source(module: str) -> str:
    """The code of a module; empty where it is not at hand (a notebook)."""
    found = sys.modules[module]
    return inspect.getsource(found) if getattr(found, "__file__", None) else ""
