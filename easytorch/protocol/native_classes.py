"""Which class is ours for one of transformers', and the models that are parts of another model."""

from __future__ import annotations

import importlib

from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from easytorch.bridge.names.native_rules import families
from easytorch.layers.attention import OURS


def native_class(model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Our class for one of transformers' own: that of the same name in the family's file, or the class itself."""
    family = getattr(model_class.config_class, "model_type", "").replace("-", "_")
    if not model_class.__module__.startswith("transformers.") or family not in families():
        return model_class
    return getattr(importlib.import_module(f"easytorch.models.{family}"), model_class.__name__, model_class)


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
