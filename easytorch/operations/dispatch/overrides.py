"""Which class of an operation's bases defines a method, and what follows for a subclass: what it overrides runs.

A class that comes earlier in the method resolution order is the more derived one. A mixin counts like a subclass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from easytorch.operations.dispatch.patches import watched
from easytorch.operations.dispatch.paths import FILES
from easytorch.operations.dispatch.shortcuts import available


def depth(cls: type, *names: str) -> int:
    """Where in the method resolution order the first class stands that defines one of `names`; its length if none."""
    order = cls.__mro__
    return next((place for place, one in enumerate(order) if any(name in one.__dict__ for name in names)), len(order))


def offers_cpp(cls: type) -> bool:
    """Whether the operator in C++ computes what the class says: neither its definition nor its path for the CPU is
    more derived than `forward_cpp`."""
    own = depth(cls, "forward_cpp")
    return own < len(cls.__mro__) and own <= depth(cls, "forward_cpu", "forward_native")


def runs_unchecked(cls: type) -> bool:
    """Whether `run_cpp` still computes what `forward_cpp` does: nothing that goes into it is more derived."""
    return depth(cls, "run_cpp") <= depth(cls, "forward_cpp", "run")


def takes_every_call(cls: Any, method: str, backend: str) -> bool:
    """Whether `supports` need not be asked of a path.

    Either the class says so by `unconditional`, and no subclass answers otherwise; or the path is a subclass' own, of a
    library that the class which answers has never heard of.
    """
    answers = depth(cls, "supports", "supports_features", "refusal")
    if backend in cls.unconditional:
        return depth(cls, "unconditional") <= answers
    named = hasattr(getattr(cls, method), "backend") and backend in FILES
    return method != "forward_native" and not named and depth(cls, method) < answers


def has_own_path(cls: type, method: str) -> bool:
    """Whether a path is more derived than the `candidates` that would choose among others."""
    return method != "forward_native" and depth(cls, method) < depth(cls, "candidates")


def own_paths_first(platforms: frozenset[str], candidates: Callable[..., Any]) -> Callable[..., Any]:
    """`candidates`, but on `platforms` the path of the class alone."""

    def own(self: Any, platform: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._own[platform] if platform in platforms else candidates(self, platform, args, kwargs)

    return own


def has_shortcuts(cls: type) -> bool:
    """Whether `shortcut` still says what a call computes: nothing that goes into it is more derived, or can be replaced
    unnoticed."""
    return available() and watched(cls) and depth(cls, "shortcut") <= depth(
        cls, "__call__", "check_call", "choose_on", "choose_freely", "candidates", "prefers_cpp", "supports", "cast",
        "run", "run_cpp", "forward_native", "forward_cpu", "forward_gpu", "forward_cpp",
    )  # fmt: skip
