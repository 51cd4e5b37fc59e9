"""What tells one rule table from another in another process, so that `--resume` goes on with the same one.

Layouts are functions, whose names and `repr` say nothing of what they do: what is told is their code, with the values
that they have closed over and, of a user's own, the globals that they read. Those of this package are told by name, as
its version is.
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
# What others have installed, whose versions are taken to stay.
_INSTALLED = tuple(sysconfig.get_paths()[kind] for kind in ("stdlib", "purelib", "platlib"))
# What `repr` tells whole.
_PLAIN = (str, bytes, int, float, complex, type(None), type(...), range, slice, np.generic)


def fingerprint(rules: Rules) -> str:
    """The same for tables that do the same, as far as their code tells."""
    return hashlib.sha256(repr(_Teller().told(rules)).encode()).hexdigest()


class _Teller:
    """Says what values are in plain data; one that is met again by its number."""

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
    """Whether a value with a name is told by more than that."""
    return isinstance(value, FunctionType | MethodType | CodeType)


def _names(code: CodeType) -> set[str]:
    """What a function and those inside it read by name."""
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    return set(code.co_names).union(*map(_names, inner))
