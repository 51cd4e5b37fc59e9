"""A function of transformers that calls another one of ours: the same code, which sees it under a global's name."""

from __future__ import annotations

import types
from typing import Any


def global_of(function: Any, name: str) -> Any:
    """What `function`, below its decorators, calls by the global `name`; None where it calls none.

    None, too, below a decorator that does not keep what it calls in a cell: `with_global` cannot make it anew.
    """
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        if not any(cell.cell_contents is inner for cell in getattr(function, "__closure__", None) or ()):
            return None
        function = inner
    called = isinstance(function, types.FunctionType) and name in function.__code__.co_names
    return function.__globals__.get(name) if called else None


def with_global(function: Any, name: str, value: Any) -> Any:
    """`function`, which sees `value` under the global `name`; the others are those of its module."""
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        return _like(function, {**function.__globals__, name: value}, function.__closure__)
    replaced = with_global(inner, name, value)
    cells = tuple(types.CellType(replaced) if cell.cell_contents is inner else cell for cell in function.__closure__)
    outer = _like(function, function.__globals__, cells)
    outer.__wrapped__ = replaced
    return outer


def _like(function: Any, seen: dict[str, Any], cells: Any) -> Any:
    made = types.FunctionType(function.__code__, seen, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__, made.__qualname__ = function.__kwdefaults__, function.__qualname__
    vars(made).update(vars(function))
    return made
