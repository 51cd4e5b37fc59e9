"""A model without memory: shapes and dtypes alone, to be filled later."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig


def lazy_init(model_class: Any, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> Any:
    """A model of `config` whose tensors are on the meta device: nothing is allocated, and nothing can be computed.

    model_class: a model class, or an auto class. `merge_params` fills it with given parameters, and computes the
    buffers that no checkpoint holds. args, kwargs: those of construction, such as `dtype` and `attn_implementation`.
    """
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"lazy_init takes a config of transformers, not {type(config).__name__}")
    wanted = getattr(model_class, "config_class", None)
    if wanted is not None and not isinstance(config, wanted):
        raise TypeError(f"{model_class.__name__} takes a {wanted.__name__}, not {type(config).__name__}")
    build = getattr(model_class, "from_config", None) or model_class._from_config
    with torch.device("meta"):
        return build(config, *args, **kwargs)
