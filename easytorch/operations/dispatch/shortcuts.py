"""Shortcuts of small calls: for one like an earlier one its checks and its choice hold, and only what it ran is run.

Choosing takes longer than computing a few numbers. A guard of torch, made for compiled graphs, compares in one call of
C++ the type, dtype, device, sizes, strides, requires_grad and dispatch keys of all tensors of a call with those of an
earlier one; in the keys stand autocast, inference mode, dispatch modes, torch.func's transforms and tracing.
`OperationImpl` asks it, and whether gradients are recorded; what does not fit is checked and chosen as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# The most numbers of the first tensor of such a call: with more of them the choice is a small part of the time.
LARGEST = 2**14
# How many sizes of a first tensor are kept, and calls of each.
SIZES, CALLS = 32, 4

_PLAIN = frozenset((Tensor, torch.nn.Parameter))
recording = torch.is_grad_enabled
_Guards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)

Run = Callable[..., Any]


class Shortcuts:
    """Those of an operation; a copy of it, and what is pickled, has none."""

    __slots__ = ("_seen", "known")

    def __init__(self) -> None:
        # whether gradients are recorded -> numbers of the first tensor -> (how many tensors, flags, guard, run)
        self.known: tuple[dict[int, list[tuple[int, dict[str, Any], Run, Run]]], ...] = ({}, {})
        self._seen: set[tuple[bool, int]] = set()

    def __reduce__(self) -> tuple[type[Shortcuts], tuple[()]]:
        return Shortcuts, ()

    def wants(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call that was not found is to be added: one of few numbers, of plain tensors, flags and nothing
        else, whose size comes a second time."""
        if _Guards is None or not args or type(args[0]) not in _PLAIN or not 0 < args[0].numel() <= LARGEST:
            return False
        size = (recording(), args[0].numel())
        if size not in self._seen:
            if len(self._seen) == SIZES:
                self._seen.clear()
            self._seen.add(size)
            return False
        known = self.known[size[0]]
        return (
            (len(known[size[1]]) < CALLS if size[1] in known else len(known) < SIZES)
            and all(type(one) in _PLAIN and one.is_cpu and one.layout is torch.strided for one in args)
            and all(one is True or one is False or one is None for one in kwargs.values())
        )

    def add(self, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run) -> None:
        """Keeps what computes a call that `wants` was true of."""
        plans = self.known[recording()].setdefault(args[0].numel(), [])
        plans.append((len(args), dict(kwargs), _check_of(args), run))


def same(kwargs: dict[str, Any], flags: dict[str, Any]) -> bool:
    """Whether the same names are given the same of True, False and None."""
    if len(kwargs) != len(flags):
        return False
    for name, flag in flags.items():  # noqa: SIM110 - `all` of a generator takes longer
        if kwargs.get(name, flags) is not flag:
            return False
    return True


def _check_of(tensors: tuple[Tensor, ...]) -> Run:
    if len({id(one) for one in tensors}) == len(tensors):
        return _guard(*tensors)
    checks = [_guard(one) for one in tensors]  # one of several takes no tensor twice

    def check_each(*given: Tensor) -> bool:
        for check, one in zip(checks, given, strict=True):  # noqa: SIM110 - as above
            if not check(one):
                return False
        return True

    return check_each


def _guard(*tensors: Tensor) -> Run:
    sizes, strides = [list(one.shape) for one in tensors], [list(one.stride()) for one in tensors]
    check: Run = _Guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check
