"""Slots and settings that a saved state gives to an optimizer of torch, checked before it takes them.

An optimizer checks its settings when it is made, and its slots never: with a slot too few, or a step that is no number,
its next step is a KeyError, or half done.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

# Slots of torch's own optimizers that have their parameter's shape.
_SHAPED = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "acc_delta", "sum"}
_SHAPED |= {"ax", "grad_avg", "prev", "variance"}
# Adafactor's, of rows and columns.
_FACTORED = {"row_var": -1, "col_var": -2}


# What each needs of a parameter that it has slots for; SGD's momentum may be missing, LBFGS keeps lists.
_NEEDED = {
    "Adadelta": ("step", "square_avg", "acc_delta"),
    "Adafactor": ("step",),
    "Adagrad": ("step", "sum"),
    "Adam": ("step", "exp_avg", "exp_avg_sq"),
    "AdamW": ("step", "exp_avg", "exp_avg_sq"),
    "Adamax": ("step", "exp_avg", "exp_inf"),
    "ASGD": ("step", "eta", "mu", "ax"),
    "Muon": ("momentum_buffer",),
    "NAdam": ("step", "exp_avg", "exp_avg_sq", "mu_product"),
    "RAdam": ("step", "exp_avg", "exp_avg_sq"),
    "RMSprop": ("step", "square_avg"),
    "Rprop": ("step", "prev", "step_size"),
    "SparseAdam": ("step", "exp_avg", "exp_avg_sq"),
}
# Setting -> the slot that goes with it, of those that have both.
_BY_SETTING = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg", "momentum": "momentum_buffer"}
_WITH_SETTING = {"Adam": ("amsgrad",), "AdamW": ("amsgrad",), "RMSprop": ("centered", "momentum")}


def check_slots_of(
    kind: str, name: str, parameter: torch.Tensor, values: Mapping[str, Any], group: Mapping[str, Any]
) -> None:
    """`ValueError` for slots of the parameter `name` that an optimizer of class `kind` with these settings refuses."""
    for slot, value in values.items():
        wanted = _shape(slot, parameter)
        if wanted is None or value is None:
            continue
        if isinstance(value, torch.Tensor) and tuple(value.shape) != wanted:
            shapes = f"{tuple(value.shape)}, and its parameter {tuple(parameter.shape)}"
            raise ValueError(f"the slot {slot!r} of {name!r} has the shape {shapes}")
        if not isinstance(value, torch.Tensor) or not (
            value.is_floating_point() or (value.is_complex() and parameter.is_complex())
        ):
            given = value.dtype if isinstance(value, torch.Tensor) else repr(value)
            raise ValueError(f"the slot {slot!r} of {name!r} must be a tensor of floats, and is {given}")
    module, _, optimizer = kind.rpartition(".")
    if not module.startswith("torch.optim") or not values:
        return
    needed = [*_NEEDED.get(optimizer, ())]
    needed += [_BY_SETTING[one] for one in _WITH_SETTING.get(optimizer, ()) if group.get(one)]
    if optimizer == "Adafactor":
        needed += ["row_var", "col_var"] if parameter.dim() > 1 else ["variance"]
    if missing := next((slot for slot in needed if values.get(slot) is None), None):
        raise ValueError(f"the slots of {name!r} lack {missing!r}, and {optimizer} needs {', '.join(needed)}")
    if "step" in needed and not _is_count(values["step"], optimizer):
        what = "an integer" if optimizer == "SparseAdam" else "a tensor of one float"
        raise ValueError(f"the slot 'step' of {name!r} must be {what} of at least 0, and is {values['step']!r}")


def check_settings(number: int, there: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """`ValueError` for a setting of group `number` that is another kind of value than the optimizer's own."""
    for key, value in saved.items():
        if key != "params" and key in there and not _alike(value, there[key]):
            raise ValueError(
                f"{key}={value!r} of group {number} does not fit the optimizer, whose {key} is {there[key]!r}"
            )


def _is_count(value: Any, optimizer: str) -> bool:
    if optimizer == "SparseAdam":
        return type(value) is int and value >= 0
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.is_floating_point():
        return False
    return value.is_meta or 0 <= float(value) < math.inf


def _alike(value: Any, there: Any) -> bool:
    """Numbers stand for numbers, tensors of one included; None may stand where the other is a flag or None."""
    if isinstance(there, list | tuple):
        return isinstance(value, list | tuple) and len(value) == len(there) and all(map(_in_tuple, value, there))
    if there is None or isinstance(there, bool):
        return value is None or isinstance(value, bool) or (there is None and _is_number(value))
    if _is_number(there):
        return _is_number(value)
    return not isinstance(there, str) or isinstance(value, str)


def _in_tuple(value: Any, there: Any) -> bool:
    return value is None or there is None or _alike(value, there)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shape(slot: str, parameter: torch.Tensor) -> tuple[int, ...] | None:
    """The shape that a slot of torch's own optimizers has; None where it is another one's, or a number."""
    shape = list(parameter.shape)
    if slot in _FACTORED and len(shape) > 1:
        shape[_FACTORED[slot]] = 1
    return tuple(shape) if slot in _SHAPED | _FACTORED.keys() else None
