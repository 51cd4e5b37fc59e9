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


def require_memory(model: nn.Module, purpose: str, *, by_calls: bool = False, by_transformers: bool = False) -> None:
    """`ValueError` where a parameter of `model` is on the meta device and `purpose` does not get its values.

    by_calls: those that accelerate's hooks bring when a module is called are enough. by_transformers: so are those of
    a model that accelerate has dispatched, whose map transformers reads.
    """
    empty = {name for name, one in model.named_parameters() if one.is_meta}
    if not empty or (by_transformers and getattr(model, "hf_device_map", None) is not None):
        return
    offloaded = _offloaded(model)
    if first := next((name for name, _ in model.named_parameters() if name in empty - offloaded), None):
        raise ValueError(
            f"{purpose}: {first!r} of {type(model).__name__} is on the meta device and has no values; fill the model "
            "by merge_params, or load it by from_pretrained"
        )
    if not by_calls:
        refuse_offloaded(model, purpose)


def refuse_offloaded(model: nn.Module, purpose: str) -> None:
    """`ValueError` where accelerate keeps values of `model` elsewhere and brings them for calls alone."""
    if offloaded := sorted(_offloaded(model)):
        raise ValueError(
            f"{purpose}: accelerate keeps {len(offloaded)} weights of {type(model).__name__} elsewhere "
            f"({offloaded[0]!r}, ...); bring them back by accelerate.hooks.remove_hook_from_module(model, recurse=True)"
        )


def _offloaded(model: nn.Module) -> set[str]:
    """The parameters on the meta device whose values a hook of accelerate brings for the module's calls."""
    found = set[str]()
    for prefix, module in model.named_modules():
        hook: Any = module.__dict__.get("_hf_hook")
        offloading = [one for one in (hook, *getattr(hook, "hooks", ())) if getattr(one, "offload", False)]
        if offloading:
            below = any(getattr(one, "place_submodules", False) for one in offloading)
            named = module.named_parameters(prefix, recurse=below)
            found |= {name for name, one in named if one.is_meta}
    return found
