"""What every layer asks of transformers' config at every call, without the Python that its `__getattribute__` runs.

`config.name` takes 1 us there, and a property twice that: an attention of one token, of 15 us, asks for two of them.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

_fields = object.__getattribute__
_IMPLEMENTATION, _OUTPUT_ATTENTIONS = PreTrainedConfig._attn_implementation, PreTrainedConfig.output_attentions


def attn_implementation(config: PreTrainedConfig) -> Any:
    """`config._attn_implementation`."""
    if type(config)._attn_implementation is _IMPLEMENTATION:  # else a class of its own mind (hrm_text)
        return _fields(config, "_attn_implementation_internal")
    return config._attn_implementation


def wants_attentions(config: Any) -> bool:
    """`config.output_attentions`; False for what has none."""
    if getattr(type(config), "output_attentions", None) is _OUTPUT_ATTENTIONS:
        return bool(_fields(config, "__dict__").get("_output_attentions"))
    return bool(getattr(config, "output_attentions", False))
