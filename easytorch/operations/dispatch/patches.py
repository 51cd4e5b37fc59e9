"""Methods replaced after their class was made, as tests and debuggers do: what an operation remembers of calls ends.

Set or deleted on a class, by its metaclass, or set on an instance, by `OperationImpl.__setattr__`. While one is
replaced no shortcut is made; put back, they are again.
"""

from __future__ import annotations

import types
from abc import ABC, ABCMeta
from typing import Any

from easytorch.operations.dispatch.shortcuts import forget_all

_METHODS = (types.FunctionType, staticmethod, classmethod)


class OperationType(ABCMeta):
    """The class of operations' classes. _made: the methods of one when it was made, its bases' too."""

    _made: dict[str, Any]

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(name, bases, namespace)
        type.__setattr__(cls, "_made", _methods(cls))

    def __setattr__(cls, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        cls._changed()

    def __delattr__(cls, name: str) -> None:
        super().__delattr__(name)
        cls._changed()

    def _changed(cls) -> None:
        if "_made" in vars(cls):  # not while it is made
            forget_all()


def unpatched(*operations: Any) -> bool:
    """Whether the methods of these operations are those that their classes, and the bases of these, were made with."""
    for operation in operations:
        cls = type(operation)
        if not vars(operation).keys().isdisjoint(cls._made):
            return False
        # the bases too: a class may have been made of a patched one
        for base in cls.__mro__:
            if isinstance(base, OperationType) and _methods(base) != base._made:
                return False
    return True


def watched(cls: type) -> bool:
    """Whether every base of an operation's class reports when a method of it is replaced; a plain mixin does not."""
    return all(isinstance(base, OperationType) or base in (ABC, object) for base in cls.__mro__)


def _methods(cls: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base is not object:
            found.update(vars(base))
    return {name: value for name, value in found.items() if isinstance(value, _METHODS)}
