"""The platform a call runs on, determined by its tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")

# A device type that is not listed has no path of its own and takes the definition, `forward_native`.
_PLATFORM_OF_DEVICE = {"cpu": "cpu", "cuda": "rocm" if torch.version.hip else "cuda", "xla": "tpu"}


def first_tensor(values: Iterable[Any]) -> Tensor | None:
    """The first tensor among `values`, looking into lists, tuples and dicts."""
    for value in values:
        if isinstance(value, Tensor):
            return value
        if isinstance(value, list | tuple):
            found = first_tensor(value)
        elif isinstance(value, dict):
            found = first_tensor(value.values())
        else:
            continue
        if found is not None:
            return found
    return None


def platform_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The platform of the first tensor of a call; `"native"` for a call without tensors."""
    if args:
        tensor = args[0]
        if isinstance(tensor, Tensor):
            if tensor.is_cpu:  # a tenth of the time of device.type, which makes two objects
                return "cpu"
            return _PLATFORM_OF_DEVICE.get(tensor.device.type, "native")
    tensor = first_tensor((*args, *kwargs.values()))
    return "native" if tensor is None else _PLATFORM_OF_DEVICE.get(tensor.device.type, "native")
