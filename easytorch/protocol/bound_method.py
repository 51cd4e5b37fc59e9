"""A method of one instance, whose class stays as it is."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel


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
        make, (known, _) = self.__reduce__()
        copied: Bound = make(known, copy.deepcopy(self._alive(), memo))
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return Bound, (self.function, self._alive())
