"""Quantization-aware training: weights that are rounded to a format in every forward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from easytorch.layers.quantized_formats import FormatSettings, quantize_weight


class StraightThrough(nn.Module):
    """A parametrization: the weight rounded to the format, with the gradient of the weight itself.

    transposed: of weights (in, out), or stacks of them.
    """

    def __init__(self, settings: FormatSettings, transposed: bool) -> None:
        super().__init__()
        self.settings, self.transposed = settings, transposed

    def forward(self, weight: Tensor) -> Tensor:
        rows = weight.transpose(-1, -2) if self.transposed else weight
        matrices = rows.reshape(-1, *rows.shape[-2:])
        decoded = [quantize_weight(one, self.settings).dequantize(weight.dtype) for one in matrices]
        rounded = torch.stack(decoded).reshape(rows.shape)
        return weight + ((rounded.transpose(-1, -2) if self.transposed else rounded) - weight).detach()


def simulate(module: nn.Module, name: str, settings: FormatSettings, transposed: bool) -> None:
    """Rounds the parameter `name` of `module` where it is read. State dicts keep it under its name, not rounded."""
    if not is_simulated(module):
        module.register_state_dict_post_hook(_saved)
        module.register_load_state_dict_pre_hook(_loaded)
    parametrize.register_parametrization(module, name, StraightThrough(settings, transposed))


def stop_simulating(module: Any) -> None:
    """The parameters of `module` as they were trained."""
    for name in list(module.parametrizations):
        parametrize.remove_parametrizations(module, name, leave_parametrized=False)


def is_simulated(module: nn.Module) -> bool:
    """Whether weights of `module` are rounded where they are read."""
    return any(isinstance(one, StraightThrough) for name in _names(module) for one in module.parametrizations[name])  # type: ignore[index]


def _names(module: nn.Module) -> list[str]:
    return list(module.parametrizations) if parametrize.is_parametrized(module) else []  # type: ignore[arg-type]


def _saved(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    for name in _names(module):
        inner = f"{prefix}parametrizations.{name}.original"
        if inner in state_dict:
            state_dict[f"{prefix}{name}"] = state_dict.pop(inner)


def _loaded(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in _names(module):
        if f"{prefix}{name}" in state_dict:
            state_dict[f"{prefix}parametrizations.{name}.original"] = state_dict.pop(f"{prefix}{name}")
