"""`BridgeMixin`'s methods, as attributes of one instance of transformers' own class."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from easytorch.bridge.memory.tree import Tree
from easytorch.protocol import conversion
from easytorch.protocol.batching import generate_batch


class Bound:
    """`function(model, ...)` as an attribute of the model, with only a weak reference to it.

    A strong reference would make a cycle, and a deleted model's weights would stay until the garbage collector runs.
    """

    def __init__(self, function: Callable[..., Any], model: PreTrainedModel) -> None:
        self.function = function
        self._model = weakref.ref(model)
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self._alive(), *args, **kwargs)

    def _alive(self) -> PreTrainedModel:
        model = self._model()
        if model is None:
            raise ReferenceError(f"the model that {self.function.__name__} belongs to has been deleted; keep it")
        return model

    def __deepcopy__(self, memo: dict[int, Any]) -> Bound:
        return Bound(self.function, copy.deepcopy(self._alive(), memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return Bound, (self.function, self._alive())


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
    """The public names of `BridgeMixin`, for `model`, and `generate_batch`."""
    transform = Transform(type(model), model.config, tuple(model.state_dict()))
    batching = {"generate_batch": Bound(_generate_batch, model)} if hasattr(type(model), "generate_batch") else {}
    return batching | {
        "to_torch": Bound(conversion.to_torch, model),
        "to_flax": Bound(conversion.to_flax, model),
        "from_flax": FromFlax(type(model)),
        "transform_fn": transform,
        "pure_transform_fn": transform,
    }


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
