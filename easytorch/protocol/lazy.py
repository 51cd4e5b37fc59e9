"""A model without memory: shapes and dtypes alone, to be filled later."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from easytorch.argument_types import check_types


@check_types("config")
def lazy_init(model_class: type[Any], config: PreTrainedConfig, *args: Any, **kwargs: Any) -> Any:
    """A model of `config` whose tensors are on the meta device: nothing is allocated, and nothing can be computed.

    model_class: a model class, or an auto class. `merge_params` fills it with given parameters, and computes the
    buffers that no checkpoint holds. args, kwargs: those of construction, such as `dtype` and `attn_implementation`.
    """
    check_model_class(model_class)
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"lazy_init takes a config of transformers, not {type(config).__name__}")
    wanted = getattr(model_class, "config_class", None)
    if wanted is not None and not isinstance(config, wanted):
        raise TypeError(f"{model_class.__name__} takes a {wanted.__name__}, not {type(config).__name__}")
    build = getattr(model_class, "from_config", None) or model_class._from_config
    with torch.device("meta"):
        return build(config, *args, **kwargs)


def check_model_class(model_class: Any) -> None:
    """`TypeError` for a class that makes no model of a config."""
    if not any(callable(getattr(model_class, name, None)) for name in ("from_config", "_from_config")):
        name = getattr(model_class, "__name__", model_class)
        raise TypeError(f"model_class={name} must be a model class of transformers or an auto class")


def require_memory(model: nn.Module, purpose: str) -> None:
    """`ValueError` where a parameter of `model` is on the meta device, and accelerate does not bring its values."""
    if getattr(model, "hf_device_map", None) is not None:
        return
    if empty := next((name for name, one in model.named_parameters() if one.is_meta), None):
        raise ValueError(
            f"{purpose}: {empty!r} of {type(model).__name__} is on the meta device and has no values; fill the model "
            "by merge_params, or load it by from_pretrained"
        )
