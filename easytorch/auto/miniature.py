"""Small copies of modules, for trials of a module class without its model."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from typing import Any

import torch
from torch import nn

# The widest dimension of a copy is at least this: our operators in C++ take wide rows alone.
WIDTH = 256
NARROW, MANY = 64, 16  # that of a stack of more than so many
_UNIT = 8
MOST_WEIGHTS = 4_000_000

_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


def miniature(module: nn.Module, seed: int) -> nn.Module:
    """A copy with random float32 weights on the CPU, every width of it in proportion, and without hooks.

    Vectors and matrices change in all dimensions, stacks of them (experts') in all but the first, and so do the
    integers among the attributes that are such a width. `ValueError` where that leaves too many weights.
    """
    weights = list(module.parameters())
    stacked = any(weight.dim() > 2 for weight in weights)
    widths = {size for weight in weights for size in _widths(weight, stacked)}
    if isinstance(module, nn.Linear) or not widths:
        scale = {size: size for size in widths}
    else:
        common = math.gcd(*widths)
        least = NARROW if stacked and max(len(weight) for weight in weights) > MANY else WIDTH
        unit = _UNIT * -(-least // (_UNIT * max(size // common for size in widths)))
        scale = {size: size // common * unit for size in widths}
    count = sum(math.prod(_scaled(weight, stacked, scale)) for weight in weights)
    if count > MOST_WEIGHTS:
        raise ValueError(f"a small copy of it has {count} weights")
    return _copy(module, stacked, scale, torch.Generator().manual_seed(seed))


def _widths(weight: torch.Tensor, stacked: bool) -> torch.Size:
    """The dimensions that change: all, or those behind the first of a stack."""
    return weight.shape[1:] if stacked else weight.shape


def _scaled(weight: torch.Tensor, stacked: bool, scale: dict[int, int]) -> list[int]:
    return [*weight.shape[:1] * stacked, *(scale[size] for size in _widths(weight, stacked))]


def _copy(module: nn.Module, stacked: bool, scale: dict[int, int], generator: torch.Generator) -> nn.Module:
    made: nn.Module = type(module).__new__(type(module))
    skipped = ("_parameters", "_modules", "_buffers", "forward", "_old_forward", "_hf_hook", *_HOOKS)
    for name, value in vars(module).items():
        if name not in skipped:
            sized = type(value) is int and not name.startswith("_")
            made.__dict__[name] = scale.get(value, value) if sized else _value(value)
    made.__dict__.update({name: OrderedDict() for name in _HOOKS if name in vars(module)})
    made.__dict__["_buffers"] = {}
    made.__dict__["_parameters"] = {
        name: None if weight is None else _weight(weight, stacked, scale, generator)
        for name, weight in module._parameters.items()
    }
    made.__dict__["_modules"] = {
        name: None if child is None else _copy(child, stacked, scale, generator)
        for name, child in module._modules.items()
    }
    return made


def _value(value: Any) -> Any:
    return value if isinstance(value, nn.Module) else copy.copy(value)


def _weight(weight: torch.Tensor, stacked: bool, scale: dict[int, int], generator: torch.Generator) -> nn.Parameter:
    shape = _scaled(weight, stacked, scale)
    fan = shape[-1] if len(shape) > 1 else 4
    return nn.Parameter(torch.randn(shape, generator=generator) * fan**-0.5)
