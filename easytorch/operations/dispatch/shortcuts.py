"""Shortcuts of small calls: for one like an earlier one its checks and its choice hold, and only what it ran is run.

Choosing takes longer than computing a few numbers. A guard of torch, made for compiled graphs, compares in one call of
C++ the type, dtype, device, sizes, strides, requires_grad and dispatch keys of all tensors of a call with those of an
earlier one; in the keys stand autocast, inference mode, dispatch modes, torch.func's transforms and tracing.
`OperationImpl` asks it, whether gradients are recorded, and whether the other arguments are the same; what does not fit
is checked and chosen as ever. All are forgotten where a method of an operation is replaced (patches.py).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

# The most numbers of the first tensor of such a call: with more of them the choice is a small part of the time.
LARGEST = 2**14
# How many sizes of the first two tensors are kept, and calls of each.
SIZES, CALLS = 64, 4
# After so many calls in a row that found none, all are forgotten, and none is looked for during the next ones: sizes
# that never come back, as those of growing keys, are not to take longer than without shortcuts.
PATIENCE, REST = 64, 960

PLAIN = frozenset((Tensor, torch.nn.Parameter))
# The types of the other arguments, which are compared by value: NumPy's numbers and tensors are none of them.
_VALUES = frozenset((bool, int, float, str, type(None)))
recording = torch.is_grad_enabled
_Guards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)
_strided = torch.strided

Run = Callable[..., Any]
# whether gradients are recorded, numbers of the first tensor and of the second, -1 for none
Key = tuple[bool, int, int]


class Shortcut(NamedTuple):
    """One call: `run(*tensors)` computes those like it."""

    given: int  # how many positional arguments
    tensors: int  # how many of them, the first ones, are tensors
    values: tuple[Any, ...]  # the others
    named: dict[str, Any]
    check: Run  # the guard of the tensors
    run: Run


_ALL: weakref.WeakSet[Shortcuts] = weakref.WeakSet()  # that have kept one
LOCK = threading.Lock()


class Shortcuts:
    """Those of an operation; a copy of it, and what is pickled, has none."""

    __slots__ = ("__weakref__", "_asked", "in_cpp", "known", "missed", "resting")

    def __init__(self) -> None:
        self.known: dict[Key, list[Shortcut]] = {}
        self.in_cpp: Any = None  # the same calls as C++ finds them (repeated.py)
        self._asked: dict[Key, int] = {}  # how often `wants` was asked of a size
        self.missed = 0  # calls in a row that found none
        self.resting = 0  # how many calls will not look for one

    def __reduce__(self) -> tuple[type[Shortcuts], tuple[()]]:
        return Shortcuts, ()

    def forget(self) -> None:
        self.known, self._asked, self.missed = {}, {}, 0
        if self.in_cpp is not None:
            self.in_cpp.forget()

    def wants(self, key: Key, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """How many tensors come first in a call that was not found, if it is to be added, else 0: one of few numbers,
        of plain tensors, then numbers, strings and flags, whose size comes a second time."""
        if type(key[1]) is not int or not 0 < key[1] <= LARGEST:  # torch.jit.trace has tensors of them
            return 0
        if self.in_cpp is not None and self.in_cpp.found:
            self.missed, self.in_cpp.found = 0, 0
        self.missed += 1
        if self.missed >= PATIENCE:
            self.forget()
            self.resting = REST
            return 0
        if len(self.known) >= SIZES and key not in self.known:
            return 0
        asked = self._asked.get(key, 0)
        if asked > CALLS:
            return 0
        if len(self._asked) > 4 * SIZES:
            self._asked.clear()
        self._asked[key] = asked + 1
        return _leading(args, kwargs) if asked else 0

    def add(self, key: Key, tensors: int, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run) -> None:
        """Keeps what computes a call that `wants` was true of; `LOCK` is held."""
        _ALL.add(self)
        check = _check_of(args[:tensors])
        made = Shortcut(len(args), tensors, args[tensors:], dict(kwargs), check, run)
        self.known.setdefault(key, []).append(made)


def forget_all() -> None:
    """Every operation's: a method of one may be called by another."""
    with LOCK:
        for one in _ALL:
            one.forget()


def available() -> bool:
    """Whether this torch has the guard."""
    return _Guards is not None


def same(kwargs: dict[str, Any], named: dict[str, Any]) -> bool:
    """Whether the same names are given the same values."""
    if len(kwargs) != len(named):
        return False
    for name, value in named.items():
        given = kwargs.get(name, named)
        # the type too: True is equal to 1, and some numbers of NumPy are floats
        if given is not value and (type(given) is not type(value) or given != value):
            return False
    return True


def same_values(given: tuple[Any, ...], values: tuple[Any, ...]) -> bool:
    """`same` of as many positional arguments."""
    for one, value in zip(given, values, strict=True):
        if one is not value and (type(one) is not type(value) or one != value):
            return False
    return True


def _leading(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How many tensors come first, if they are plain and what follows are plain values, else 0."""
    tensors = 0
    for one in args:
        if type(one) not in PLAIN:
            break
        if not one.is_cpu or one.layout is not _strided:
            return 0
        tensors += 1
    others = (*args[tensors:], *kwargs.values())
    # a NaN is not equal to itself
    return tensors if all(type(one) in _VALUES and one == one for one in others) else 0


def _check_of(tensors: tuple[Tensor, ...]) -> Run:
    if len({id(one) for one in tensors}) == len(tensors):
        return _guard(*tensors)
    checks = [_guard(one) for one in tensors]  # one of several takes no tensor twice

    def check_each(*given: Tensor) -> bool:
        for check, one in zip(checks, given, strict=True):  # noqa: SIM110 - `all` of a generator takes longer
            if not check(one):
                return False
        return True

    return check_each


def _guard(*tensors: Tensor) -> Run:
    sizes, strides = [list(one.shape) for one in tensors], [list(one.stride()) for one in tensors]
    check: Run = _Guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check
