"""Modules that stand around a model: `torch.compile`'s, DistributedDataParallel's, PEFT's."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel


def unwrapped(model: nn.Module) -> Any:
    """The model inside of wrappers, which put a name of theirs before every parameter's; else the same."""
    while True:
        inside = getattr(model, "_orig_mod", None)
        if is_peft_model(model):
            inside = model.get_base_model()  # type: ignore[operator]
        elif isinstance(model, DataParallel | DistributedDataParallel):
            inside = model.module
        if not isinstance(inside, nn.Module) or inside is model:
            return model
        model = inside


def is_peft_model(model: Any) -> bool:
    peft: Any = sys.modules.get("peft")  # where it is not loaded, nothing is of it
    return peft is not None and isinstance(model, peft.PeftModel)


def refuse_peft_model(model: Any, function: str) -> None:
    """`TypeError` for a `peft.PeftModel`, which would be left around layers that are not there any more."""
    if is_peft_model(model):
        raise TypeError(
            f"{function}: {type(model).__name__} is PEFT's wrapper, which puts adapters in and takes them out itself "
            "(add_adapter, load_adapter, merge_and_unload, unload); pass a model without it"
        )
