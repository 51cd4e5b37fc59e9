"""The layer types of a causal language model, as it runs them, for its cache and its masks."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from easytorch.cache.static import BOTH, LINEAR, NONE


class ModelLayers(NamedTuple):
    """The facts about a model's layers that a decoder needs.

    config: the model's, of which a cache can be made: without layer types and windows that the model does not read.
    types: of each layer, as transformers' caches name them. masks_of: the mask function of each type, None where
    none is known. by_type: the model takes its masks as a dict by layer type.
    """

    config: Any
    types: list[str]
    masks_of: Mapping[str, Callable[..., Any] | None]
    by_type: bool


def layers_of(model: Any) -> ModelLayers:
    """Asked of the model where it is ours; of what its config's class declares where it is transformers'."""
    from transformers.cache_utils import get_layer_types_and_kwargs

    from easytorch.layers.decoder import DecoderBackbone
    from easytorch.layers.masks import FULL, MASKS_OF
    from easytorch.layers.recurrent import recurrent_mask

    config, backbone = model.config.get_text_config(decoder=True), model.base_model
    backbone = getattr(backbone, "language_model", backbone)  # of a model of images and text
    if isinstance(backbone, DecoderBackbone):
        config = backbone.config_of_cache()
        known: Mapping[str, Any] = backbone.masks_of
        kinds, by_type = {*backbone.layer_types}, True
    else:
        config = _as_declared(config)
        known = {**MASKS_OF, LINEAR: recurrent_mask, BOTH: {FULL: MASKS_OF[FULL], LINEAR: recurrent_mask}}
        kinds = {*get_layer_types_and_kwargs(config)[0]} - NONE
        by_type = hasattr(config, "layer_types") and kinds != {LINEAR}
    masks_of: dict[str, Callable[..., Any] | None] = {}
    for kind in sorted(kinds):
        make = known.get(kind)
        # a layer of several parts has a mask for each
        masks_of |= make if isinstance(make, Mapping) else {kind: make}
    return ModelLayers(config, get_layer_types_and_kwargs(config)[0], masks_of, by_type)


def numbered(model: Any) -> list[Any]:
    """The modules that know which layer of a cache is theirs: neither the blocks around them nor parts of them, which
    are numbered too."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    found: list[Any] = []
    parts: set[Any] = set()
    for one in model.modules():
        block = isinstance(one, GradientCheckpointingLayer)
        if one not in parts and not block and isinstance(getattr(one, "layer_idx", None), int):
            found.append(one)
            parts.update(one.modules())
    return found


def _as_declared(config: Any) -> Any:
    """The config without settings that its class does not know, which its model does not read.

    A config keeps every key it is given: a Llama's too may have `layer_types`, and attends everywhere nonetheless.
    """
    names = ("layer_types", "sliding_window", "attention_chunk_size")
    unknown = [name for name in names if hasattr(config, name) and not _declares(type(config), name)]
    if unknown:
        config = copy.copy(config)
        for name in unknown:
            delattr(config, name)
    return config


def _declares(kind: Any, name: str) -> bool:
    """Whether a class of configs has such a setting, as a field or because its constructor sets it."""
    parameters = inspect.signature(kind).parameters
    if hasattr(kind, name) or name in kind.attribute_map or name in parameters:
        return True
    given = (p for p in parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
    return any(p.default is p.empty for p in given) or hasattr(kind(), name)
