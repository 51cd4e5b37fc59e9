"""Config attributes that every layer reads at every call, without the cost of the config's `__getattribute__`.

`config.name` takes 1 us, a property 2 us, and an attention of one token, which takes 15 us, reads two of them.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

_fields = object.__getattribute__
_IMPLEMENTATION, _OUTPUT_ATTENTIONS = PreTrainedConfig._attn_implementation, PreTrainedConfig.output_attentions


def attn_implementation(config: PreTrainedConfig) -> Any:
    if type(config)._attn_implementation is _IMPLEMENTATION:  # else the class overrides it (hrm_text)
        return _fields(config, "_attn_implementation_internal")
    return config._attn_implementation


def config_of_layer(config: Any, layer: int | str) -> Any:
    """The config of a layer, by index, or of a type of layers that are alike: `config` itself unless sizes differ."""
    return config.per_layer_config[layer] if config.is_heterogeneous else config


def scales_by_slot(config: Any) -> bool:
    """Whether queries are scaled by their slots in the cache, which padding moves, as Llama 4's are."""
    return bool(getattr(config.get_text_config(decoder=True), "attn_temperature_tuning", False))


def wants_attentions(config: Any) -> bool:
    """`config.output_attentions`; False for a config without it."""
    if getattr(type(config), "output_attentions", None) is _OUTPUT_ATTENTIONS:
        return bool(_fields(config, "__dict__").get("_output_attentions"))
    return bool(getattr(config, "output_attentions", False))
