"""Sizes and settings of a module under the names that transformers' modules have them by, for code that reads those.

A class states them: `num_v_heads = same_as("value_heads")`, `hidden_size = given_by("config.hidden_size")`.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import nn


def given_by(path: str) -> Any:
    """An attribute that reads `path` of the module until it is set itself, which changes nothing else.

    Of what no forward reads, in transformers neither: what does is an attribute of the instance, or `same_as` one.
    """
    return _GivenBy(path)


def same_as(path: str) -> Any:
    """Another name of the module's `path`, to read and to set it by."""
    return _SameAs(path)


def product_of(*paths: str) -> Any:
    """As `given_by`, the product of several."""
    return _GivenBy(*paths)


def of_layer(path: str) -> Any:
    """As `given_by`, the entry of the module's own layer, `layer_idx`, in a list."""
    return _OfLayer(path)


class _GivenBy:
    def __init__(self, *paths: str) -> None:
        self.read = [operator.attrgetter(path) for path in paths]

    def __get__(self, module: nn.Module | None, owner: type[nn.Module]) -> Any:
        if module is None:
            return self
        value, *others = (read(module) for read in self.read)
        for other in others:
            value = value * other
        return value


class _OfLayer(_GivenBy):
    def __get__(self, module: nn.Module | None, owner: type[nn.Module]) -> Any:
        values = super().__get__(module, owner)
        return values if module is None else values[module.layer_idx]


class _SameAs(_GivenBy):
    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.owner, _, self.name = path.rpartition(".")

    def __set__(self, module: nn.Module, value: Any) -> None:
        setattr(operator.attrgetter(self.owner)(module) if self.owner else module, self.name, value)


def share_config(model: Any) -> None:
    """Gives each module of `model` that is of a family, and has no config of its own, the model's."""
    for module in model.modules():
        if "config" not in vars(module) and not type(module).__module__.startswith(("torch.", "transformers.")):
            module.config = model.config
