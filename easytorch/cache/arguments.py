"""What caches share of arguments: their checks, and the name that a model gives its cache."""

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
    """What a model's forward calls its cache. Models without attention have a name of their own, and ignore the usual
    one without a word."""
    taken = inspect.signature(forward).parameters
    return "cache_params" if "cache_params" in taken and "past_key_values" not in taken else "past_key_values"
