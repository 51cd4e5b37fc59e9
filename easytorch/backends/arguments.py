"""Plain arguments of the interface, converted to their type, or a `BackendError`."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np

from easytorch.backends.errors import BackendError

_Member = TypeVar("_Member", bound=IntEnum)


def integer(value: Any, what: str = "it") -> int:
    """A Python or numpy integer. Members of enumerations are none: each has a meaning of its own."""
    if type(value) is int:
        return value
    if not isinstance(value, IntEnum):
        try:
            return int(operator.index(value))
        except TypeError:
            pass
    raise BackendError(f"{what} must be an integer, and {value!r} is none")


def integers(values: Any, what: str = "they") -> tuple[int, ...]:
    """`values` as a tuple of ints; `BackendError` where they are no sequence, or one of them is no integer."""
    return tuple(integer(value, f"each of {what}") for value in sequence(values, what))


def ints(values: tuple[Any, ...], what: str = "they") -> tuple[int, ...]:
    """Integers given one by one or as one sequence: what stands for Go's `...int`."""
    if len(values) == 1 and not hasattr(values[0], "__index__"):
        return integers(values[0], what)
    return tuple(integer(value, f"each of {what}") for value in values)


def pairs(values: Any, what: str) -> tuple[tuple[int, int], ...]:
    """A sequence of pairs of integers."""
    found = tuple(integers(pair, f"the pairs of {what}") for pair in sequence(values, what))
    if any(len(pair) != 2 for pair in found):
        raise BackendError(f"{what} must be pairs of integers, and {found} are not all")
    return found  # type: ignore[return-value]


def sequence(values: Any, what: str) -> tuple[Any, ...]:
    """A list, a tuple or another iterable; a string is a value, not a sequence of characters."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise BackendError(f"{what} must be a sequence, and {values!r} is none")
    try:
        return tuple(values)
    except TypeError:
        # 0-d numpy arrays have `__iter__` but cannot be iterated.
        raise BackendError(f"{what} must be a sequence, and {values!r} is none") from None


def truth(value: Any, what: str) -> bool:
    """True or False; other objects' truth values are not accepted."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise BackendError(f"{what} must be True or False, and {value!r} was given")


def real(value: Any, what: str) -> float:
    """A number of Python's or numpy's that is not complex."""
    if isinstance(value, bool | np.bool_ | str | bytes | np.complexfloating) or not hasattr(type(value), "__float__"):
        raise BackendError(f"{what} must be a number, and {value!r} is none")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise BackendError(f"{what} must be one number, and {value!r} is none") from None


def text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise BackendError(f"{what} must be a string, and {value!r} was given")
    return value


def member(enum: type[_Member], value: Any, what: str) -> _Member:
    """A member of `enum`, or its number; members of another enumeration are none, whatever their number."""
    if isinstance(value, enum):
        return value
    if not isinstance(value, IntEnum | bool | np.bool_) and hasattr(value, "__index__"):
        number = integer(value, what)
        if number in enum.__members__.values():
            return enum(number)
    names = ", ".join(f"{enum.__name__}.{one.name}" for one in enum)
    raise BackendError(f"{what} must be one of {names}, and {value!r} is none")
