"""The type of a rule, and the checks that rules share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

from easytorch.backends.dtypes import DType
from easytorch.backends.errors import BackendError
from easytorch.backends.shapes import Shape

Rule = Callable[..., Shape | tuple[Shape, ...]]


def takes(allowed: Collection[DType], what: str) -> Callable[[Rule], Rule]:
    """Limits a rule to first operands of these element types, which `accepted_dtypes` reports."""

    def decorate(rule: Rule) -> Rule:
        @functools.wraps(rule)
        def checked(*shapes: Any, **attributes: Any) -> Shape | tuple[Shape, ...]:
            if shapes:
                require_dtype(shapes[0], allowed, what)
            return rule(*shapes, **attributes)

        checked.dtypes = frozenset(allowed)  # type: ignore[attr-defined]
        return checked

    return decorate


def require_dtype(shape: Shape, allowed: Collection[DType], what: str) -> None:
    """`BackendError` unless `shape` has one of the element types."""
    if shape.dtype not in allowed:
        raise BackendError(f"{shape.dtype} is not accepted: {what}")


def require_same_dtype(*shapes: Shape) -> None:
    """`BackendError` unless all have the same element type: there is no type promotion."""
    if len({shape.dtype for shape in shapes}) > 1:
        raise BackendError("the operands must have one element type; convert them with `convert_dtype`")


def require_axis(shape: Shape, axis: int, what: str = "axis") -> None:
    """`BackendError` unless `axis` is one of the shape's, counted from 0."""
    if not 0 <= axis < shape.rank:
        raise BackendError(f"{what} {axis} is not one of the {shape.rank} axes of {shape}")


def broadcast_shapes(*shapes: Shape) -> tuple[int, ...]:
    """The broadcast dimensions of operands that are scalars, or have one rank and axes that are equal or 1."""
    ranked = [shape.dimensions for shape in shapes if shape.rank]
    if not ranked:
        return ()
    if len({len(dimensions) for dimensions in ranked}) > 1:
        raise BackendError("operands must be scalars or have the same rank; reshape or broadcast the others")
    result = []
    for axis, sizes in enumerate(zip(*ranked, strict=True)):
        wide = {size for size in sizes if size != 1}
        if len(wide) > 1:
            raise BackendError(
                f"axis {axis} has different sizes, {', '.join(map(str, sizes))}; they must be equal, or 1"
            )
        result.append(wide.pop() if wide else 1)
    return tuple(result)
