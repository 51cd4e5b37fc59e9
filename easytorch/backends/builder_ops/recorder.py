"""The builder's methods that its operations use, and how optional arguments are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from easytorch.backends.arguments import integers, pairs
from easytorch.backends.shapes import Shape
from easytorch.backends.types import OpType

if TYPE_CHECKING:
    from easytorch.backends.graph import Graph, Op

Ints = Sequence[int]
# A Python function `(builder, *ops) -> op or tuple of ops` over a builder of its own; it may use operations of the
# builder around it, which become further inputs.
Closure = Callable[..., Any]


class Recorder:
    """The methods of `Builder` with which the mixins of this folder record operations."""

    def _add_one(self, op_type: OpType, *operands: Any, **attributes: Any) -> Op:
        raise NotImplementedError

    def _add(self, op_type: OpType, *operands: Any, **attributes: Any) -> tuple[Op, ...]:
        raise NotImplementedError

    def _closure(self, function: Closure, shapes: Sequence[Shape], name: str) -> Graph:
        raise NotImplementedError

    def _shapes(self, operands: Sequence[Op]) -> list[Shape]:
        raise NotImplementedError


def or_default(values: Ints | None, count: int, default: int, what: str) -> tuple[int, ...]:
    """`values`, or `default` for each of `count` axes."""
    return (default,) * count if values is None else integers(values, what)


def pairs_or_none(given: Sequence[Ints] | None, count: int) -> tuple[tuple[int, int], ...]:
    """Padding at both ends of `count` axes, 0 without any."""
    return ((0, 0),) * count if given is None else pairs(given, "paddings")
