"""Shared by caches: the checks of arguments."""

from __future__ import annotations

from typing import Any


def positive(**given: Any) -> None:
    """`ValueError` for an argument that is no int of at least 1."""
    for name, value in given.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}={value!r} must be an int of at least 1")
