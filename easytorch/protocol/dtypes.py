"""The dtype of a model's floating tensors, and with it that of its computation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from easytorch.argument_types import check_types


@check_types("dtype")
def to_dtype(model: nn.Module, dtype: torch.dtype | str, change_runtime_dtype: bool = True) -> Any:
    """Casts the floating parameters and buffers of `model`, which is returned, to `dtype`; rotary frequencies stay.

    Positions are exact only by frequencies in float32, in which `from_pretrained(dtype=...)` has them too.

    dtype: a torch dtype or its name ("bfloat16"). change_runtime_dtype: also make it `config.dtype`, which
    `save_pretrained` writes.
    """
    wanted = dtype_of(dtype)
    frequencies = [
        (module, name, one)
        for module in model.modules()
        for name, one in module._buffers.items()
        if one is not None and name.endswith("inv_freq") and one.dtype in (torch.float32, torch.float64)
    ]
    model.to(wanted)
    for module, name, one in frequencies:
        module._buffers[name] = one
    config = getattr(model, "config", None)
    if change_runtime_dtype and config is not None:
        config.dtype = wanted
    return model


def dtype_of(dtype: torch.dtype | str) -> torch.dtype:
    """The floating dtype of that name; `ValueError` for any other."""
    wanted = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(wanted, torch.dtype) or not wanted.is_floating_point:
        raise ValueError(f"{dtype!r} is no floating dtype of torch; pass one such as torch.bfloat16 or 'float32'")
    return wanted


@check_types()
def half(model: nn.Module, change_runtime_dtype: bool = True) -> Any:
    """Casts the model's parameters and buffers to float16."""
    return to_dtype(model, torch.float16, change_runtime_dtype)


@check_types()
def float32(model: nn.Module, change_runtime_dtype: bool = True) -> Any:
    """Casts the model's parameters and buffers to float32; a method of native models by the name `float`."""
    return to_dtype(model, torch.float32, change_runtime_dtype)
