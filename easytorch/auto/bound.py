"""`BridgeMixin`'s methods, as attributes of one instance of transformers' own class."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from easytorch.bridge.memory.tree import Tree
from easytorch.protocol import conversion
from easytorch.protocol.adapter_methods import adapter_methods_of
from easytorch.protocol.batching import generate_batch
from easytorch.protocol.bound_method import Bound


class Transform:
    """`BridgeMixin.pure_transform_fn` for one model: it holds its names and its config, and none of its weights."""

    def __init__(self, model_class: type[PreTrainedModel], config: Any, names: tuple[str, ...]) -> None:
        self.described = (model_class, config, names)
        self._function: conversion.Transform | None = None

    def __call__(self, state_dict: Mapping[str, torch.Tensor]) -> Tree:
        if self._function is None:  # made when it is first asked for: it builds the model's outline
            self._function = conversion.transform_for(*self.described)
        return self._function(state_dict)

    def __reduce__(self) -> tuple[Any, ...]:
        return Transform, self.described


def bridge_of(model: PreTrainedModel) -> dict[str, Any]:
    """The public names of `BridgeMixin`, for `model`, `generate_batch`, and the methods of adapters."""
    transform = Transform(type(model), model.config, tuple(model.state_dict()))
    batching = {"generate_batch": Bound(_generate_batch, model)} if hasattr(type(model), "generate_batch") else {}
    return (
        batching
        | adapter_methods_of(model)
        | {
            "to_torch": Bound(conversion.to_torch, model),
            "to_flax": Bound(conversion.to_flax, model),
            "from_flax": FromFlax(type(model)),
            "transform_fn": transform,
            "pure_transform_fn": transform,
        }
    )


def _generate_batch(model: Any, *args: Any, **kwargs: Any) -> Any:
    """transformers' `generate_batch` (continuous batching), whose failures are errors here."""
    ours = vars(model).pop("set_attn_implementation", None)  # it changes the attention while it runs, and back
    try:
        return generate_batch(model, functools.partial(type(model).generate_batch, model), *args, **kwargs)
    finally:
        if ours is not None:
            model.set_attn_implementation = ours


class FromFlax:
    """`BridgeMixin.from_flax` of a class."""

    def __init__(self, model_class: type[PreTrainedModel]) -> None:
        self.model_class = model_class

    def __call__(self, config: Any, params: Any, **kwargs: Any) -> Any:
        return conversion.from_flax(self.model_class, config, params, **kwargs)
