"""Shared by caches: the checks of arguments, and the name of a model's cache argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def positive(**given: Any) -> None:
    """`ValueError` for an argument that is no int of at least 1."""
    for name, value in given.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}={value!r} must be an int of at least 1")


def cache_argument(forward: Callable[..., Any]) -> str:
    """The name of the cache argument of a model's forward. Models without attention use another name, and silently
    ignore the usual one."""
    taken = inspect.signature(forward).parameters
    return "cache_params" if "cache_params" in taken and "past_key_values" not in taken else "past_key_values"
