"""Which class is ours for one of transformers', and the models that are parts of another model."""

from __future__ import annotations

import importlib
from typing import cast

from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from easytorch.bridge.names.native_rules import families
from easytorch.layers.attention import OURS


def native_class(model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Our class for one of transformers' own: that of the same name in the family's file, or the class itself.

    The tower and the decoder of a family of images may stand in its file too, as they do in transformers.
    """
    if not model_class.__module__.startswith("transformers.models."):
        return model_class
    own = getattr(model_class.config_class, "model_type", "").replace("-", "_")
    whole = model_class.__module__.split(".")[2]
    for family in (name for name in (own, whole) if name in families()):
        found = vars(importlib.import_module(f"easytorch.models.{family}")).get(model_class.__name__)
        if found is not None:
            return cast(type[PreTrainedModel], found)
    return model_class


def new_part(config: PreTrainedConfig) -> PreTrainedModel:
    """A base model of `config` inside another model: native where its family is, else transformers' own.

    transformers' own has its own attention, for a trial (auto/trial.py) would have to show that ours is the same there.
    """
    theirs = AutoModel._model_mapping.get(type(config), None)
    if isinstance(theirs, type) and (ours := native_class(theirs)) is not theirs:
        return ours._from_config(config)
    if config._attn_implementation in OURS:
        config._attn_implementation_internal = None
    part: PreTrainedModel = AutoModel.from_config(config)
    return part
