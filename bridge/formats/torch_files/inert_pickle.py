"""Pickles read as plain data: what they would construct or call is recorded, and nothing is constructed or called.

Only names that the caller allows may occur, and only the opcodes that Python's pickler uses for such data.
Source: Python's pickletools.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from easytorch.bridge.errors import CheckpointError

_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = frozenset(
    ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")
)
_EMPTY: dict[str, type] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_IGNORED = frozenset(("PROTO", "FRAME"))
_ORDERED_DICT = "collections.OrderedDict"


@dataclass(frozen=True)
class Name:
    """A class or function by its dotted name."""

    dotted: str


@dataclass(eq=False)
class Made:
    """The recorded call of `name` with `arguments`, and the state that was set afterwards."""

    name: str
    arguments: Any
    state: Any = None

    @property
    def fields(self) -> dict[str, Any]:
        """The state as attributes by name; empty where it is none."""
        return self.state if isinstance(self.state, dict) else {}


def read_pickle(data: bytes, file: Path, allowed: Callable[[str], bool]) -> Any:
    """The value pickled in `data`, of None, bool, int, float, str, tuple, list, dict, `Name` and `Made`.

    Tuples are never keys: nested ones take exponential time to hash. The caller checks the value.
    `CheckpointError` for another name than an `allowed` one, another operation, and a damaged pickle.
    """
    try:
        return _Machine(file, allowed).run(data)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, MemoryError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"is damaged ({error}); download or save it again", file=file) from error


class _Machine:
    def __init__(self, file: Path, allowed: Callable[[str], bool]) -> None:
        self._file = file
        self._allowed = allowed
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        for name, argument in _operations(data):
            if name == "STOP":
                return self._stack.pop()
            self._step(name, argument)
        raise ValueError("no end")

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _LITERALS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name == "MARK":
            self._marks.append(stack)
            self._stack = []
        elif name in _TUPLES:
            count = _TUPLES[name]
            stack[-count:] = [tuple(stack[-count:])]
        elif name in ("TUPLE", "APPENDS", "SETITEMS"):
            self._stack = self._marks.pop()
            self._gather(name, stack)
        elif name == "APPEND":
            self._gather("APPENDS", [stack.pop()])
        elif name == "SETITEM":
            value, key = stack.pop(), stack.pop()
            self._gather("SETITEMS", [key, value])
        elif name not in _IGNORED:
            self._make(name, argument)

    def _gather(self, name: str, values: list[Any]) -> None:
        if name == "TUPLE":
            self._stack.append(tuple(values))
        elif name == "APPENDS":
            self._of_type(list).extend(values)
        else:
            target = self._of_type(dict)
            for key, value in zip(values[::2], values[1::2], strict=True):
                if not isinstance(key, str | int | Made):
                    raise ValueError(f"a {type(key).__name__} as a key")
                target[key] = value

    def _of_type(self, kind: type) -> Any:
        if not isinstance(self._stack[-1], kind):
            raise ValueError(f"a {kind.__name__} expected")
        return self._stack[-1]

    def _make(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name == "GLOBAL":
            stack.append(self._name(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(self._name(module, attribute))
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, called = stack.pop(), stack.pop()
            if not isinstance(called, Name) or not isinstance(arguments, tuple):
                raise ValueError("a call of what is no name")
            stack.append({} if called.dotted == _ORDERED_DICT else Made(called.dotted, arguments))
        elif name == "BUILD":
            state = stack.pop()
            if isinstance(stack[-1], Made):
                stack[-1].state = state
        elif name == "BINPERSID":
            stack.append(Made("", stack.pop()))
        else:
            raise ValueError(f"the operation {name}")

    def _name(self, module: Any, attribute: Any) -> Name:
        dotted = f"{module}.{attribute}"
        if not self._allowed(dotted):
            raise CheckpointError(
                f"is not a pickle of plain tensors: it names {dotted[:200]}, and others are not loaded because they "
                "can run code; save it as safetensors",
                file=self._file,
            )
        return Name(dotted)


def _operations(data: bytes) -> Iterator[tuple[str, Any]]:
    for operation, argument, _ in pickletools.genops(data):
        yield operation.name, argument
