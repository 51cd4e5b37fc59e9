"""What a call of a model leaves for the next one: a captured step with the static cache that it was captured over."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class KeptSteps(Generic[T]):
    """At most one thing a model, which ends with the model; it must not hold the model itself.

    A call takes it, so that no other call, of another thread either, uses it meanwhile, and puts it back at its end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: weakref.WeakKeyDictionary[Any, T] = weakref.WeakKeyDictionary()

    def take(self, model: Any, fits: Callable[[T], bool]) -> T | None:
        """What was kept of the model, which is freed where it does not fit."""
        with self._lock:
            found = self._kept.pop(model, None)
        return found if found is not None and fits(found) else None

    def put(self, model: Any, one: T) -> None:
        with self._lock:
            self._kept[model] = one

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()

    def __len__(self) -> int:
        return len(self._kept)
