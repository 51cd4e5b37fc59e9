"""Repeated calls that are found in C++ (kernels/repeated), before `OperationImpl.__call__` runs.

An operation keeps its calls in `_shortcuts.in_cpp` too, and the slot for calls of its class leads there; what is
not found there goes on to `__call__`, which knows the same calls. Both are slots, so C++ reads them as they lie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from easytorch.kernels.repeated import library
from easytorch.kernels.repeated.steps import Steps
from easytorch.operations.dispatch.environment import TABLE, VARIABLES

if TYPE_CHECKING:
    from easytorch.operations.dispatch.impl import OperationImpl
    from easytorch.operations.dispatch.shortcuts import Shortcuts

_prepared: Any = None  # the extension that has been told of operations


def add(
    operation: OperationImpl, shortcuts: Shortcuts, args: tuple[Any, ...], tensors: int, kwargs: dict[str, Any],
    run: Callable[..., Any],
) -> None:  # fmt: skip
    """Keeps a call in C++ too, where the extension is loaded and can compare it; `shortcuts.LOCK` is held, and no
    method of the operation is replaced."""
    from easytorch.operations.dispatch.impl import OperationImpl  # which imports this file

    module, cls = library.module(), type(operation)
    if module is None or not isinstance(TABLE, dict):
        return
    if module is not _prepared:
        _prepare(module, cls, type(shortcuts))
    if shortcuts.in_cpp is None:
        shortcuts.in_cpp = module.Known()
    steps = run if isinstance(run, Steps) else Steps(run, ())
    operators = tuple((one.name, one.overload, one.arguments) for one in steps.operators) or None
    try:
        shortcuts.in_cpp.add(
            args, tensors, dict(kwargs), steps.run, operators, steps.given_turned, steps.result_turned,
            dict(steps.switches), steps.output,
        )  # fmt: skip
    except ValueError:  # of tensors that C++ does not compare
        return
    if cls.__call__ is OperationImpl.__call__:
        module.watch(cls)


def _prepare(module: Any, operation: Any, shortcuts: Any) -> None:
    global _prepared
    module.set_switches(TABLE, VARIABLES, *library.switches())
    module.set_slots(operation._shortcuts, shortcuts.in_cpp)  # of classes, which give their descriptors
    _prepared = module
