"""A small call that is computed as ever, and from which on calls like it take a shortcut."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from easytorch.kernels.interop.torch_func import as_given
from easytorch.operations.dispatch import repeated
from easytorch.operations.dispatch.patches import unpatched
from easytorch.operations.dispatch.shortcuts import LOCK, Key, Shortcuts

if TYPE_CHECKING:
    from easytorch.operations.dispatch.impl import Choice, OperationImpl


def shorten(
    operation: OperationImpl, shortcuts: Shortcuts, key: Key, tensors: int, choice: Choice, args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    """The result of a call that `wants` was true of; where it succeeds, its shortcut is kept."""
    result = getattr(choice.operation, choice.runs)(*args, **kwargs)
    settings = _settings(operation, tensors, args, kwargs)
    if as_given() and settings is not None:
        run = operation.shortcut(choice, args[:tensors], settings)
        if run is not None:
            with LOCK:  # a method that another thread replaces is replaced before, or forgets this one after
                if unpatched(operation, choice.operation):
                    shortcuts.add(key, tensors, args, kwargs, run)
                    repeated.add(operation, shortcuts, args, tensors, kwargs, run)
    return result


def _settings(
    operation: OperationImpl, tensors: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any] | None:  # fmt: skip
    """The arguments after the first `tensors` by name; None where positional ones have none."""
    if len(args) == tensors:
        return kwargs
    names = operation._positional
    return None if names is None else {**dict(zip(names[tensors:], args[tensors:], strict=False)), **kwargs}
