"""A rule table's identity across processes, so that `--resume` continues only with the same one.

Layouts are functions, whose names and `repr` do not tell what they do: the fingerprint has their code, with closure
values and, for a user's own, the globals that they read. Functions of this package count by name, as its version does.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from easytorch.bridge.rules.table import Rules

_PACKAGE = __name__.partition(".")[0]
# Installed packages, whose versions are assumed not to change.
_INSTALLED = tuple(sysconfig.get_paths()[kind] for kind in ("stdlib", "purelib", "platlib"))
# Types whose `repr` is complete.
_PLAIN = (str, bytes, int, float, complex, type(None), type(...), range, slice, np.generic)


def fingerprint(rules: Rules) -> str:
    """A hash that is equal for tables with the same code and data."""
    return hashlib.sha256(repr(_Teller().told(rules)).encode()).hexdigest()


class _Teller:
    """Turns values into plain data; a value that occurs again becomes its number."""

    def __init__(self) -> None:
        self._met: dict[int, int] = {}
        self._kept: list[Any] = []  # ids are given again to others once their owners are gone

    def told(self, value: Any) -> Any:
        if isinstance(value, _PLAIN):
            return type(value).__name__, repr(value)
        if isinstance(value, ModuleType) or (hasattr(value, "__qualname__") and not _is_code(value)):
            return getattr(value, "__module__", ""), getattr(value, "__qualname__", getattr(value, "__name__", ""))
        if id(value) in self._met:
            return "again", self._met[id(value)]
        self._met[id(value)] = len(self._met)
        self._kept.append(value)
        return type(value).__name__, *self._parts(value)

    def _parts(self, value: Any) -> Iterator[Any]:
        if isinstance(value, list | tuple):
            yield from map(self.told, value)
        elif isinstance(value, set | frozenset):
            yield from map(self.told, sorted(value, key=repr))
        elif isinstance(value, dict):
            yield from (self.told(entry) for entry in value.items())
        elif isinstance(value, np.ndarray):
            yield value.dtype.str, value.shape, hashlib.sha256(value.tobytes()).hexdigest()
        elif isinstance(value, FunctionType):
            yield from self._function(value)
        elif isinstance(value, MethodType):
            yield from (self.told(value.__func__), self.told(value.__self__))
        elif isinstance(value, partial):
            yield from (self.told(value.func), self.told(value.args), self.told(value.keywords))
        elif isinstance(value, CodeType):
            yield from (value.co_code.hex(), value.co_names, value.co_varnames, self.told(value.co_consts))
        elif is_dataclass(value):
            yield from ((one.name, self.told(getattr(value, one.name))) for one in fields(value))
        else:
            yield self.told(type(value))
            yield self.told(getattr(value, "__dict__", None))

    def _function(self, value: FunctionType) -> Iterator[Any]:
        yield value.__module__, value.__qualname__
        yield self.told(value.__defaults__)
        yield self.told(value.__kwdefaults__)
        yield [self.told(cell.cell_contents) for cell in value.__closure__ or ()]
        if value.__module__.partition(".")[0] == _PACKAGE or value.__code__.co_filename.startswith(_INSTALLED):
            return
        yield self.told(value.__code__)
        for name in sorted(_names(value.__code__)):
            if name in value.__globals__:
                yield name, self.told(value.__globals__[name])


def _is_code(value: Any) -> bool:
    """Whether a named value is described by its code and not by its name alone."""
    return isinstance(value, FunctionType | MethodType | CodeType)


def _names(code: CodeType) -> set[str]:
    """The global names that a function and its inner functions read."""
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    return set(code.co_names).union(*map(_names, inner))
