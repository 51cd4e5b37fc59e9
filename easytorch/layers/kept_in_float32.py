"""The weights that stay in float32 in a model of 16 bits: those that the installed transformers keeps.

transformers 5.23 keeps the bias that balances experts; 5.24 the weights of routers by groups and the time steps of Kimi
Linear too, which it makes in float32.
"""

from __future__ import annotations

import torch
import transformers


def kept_in_float32(class_name: str) -> list[str]:
    """The names in `_keep_in_fp32_modules_strict` of transformers' class, for a native class to have."""
    return list(getattr(transformers, class_name)._keep_in_fp32_modules_strict or ())


def dtype_of(name: str, class_name: str = "DeepseekV3PreTrainedModel") -> torch.dtype | None:
    """The dtype to make the weight `name` of such a class in; None for the default. DeepSeek stands for all routers."""
    return torch.float32 if name in kept_in_float32(class_name) else None
