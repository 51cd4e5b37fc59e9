"""Which function lowers which operation. Ours register as users' do."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import torch

# (ctx, *args, **kwargs) -> Op, a tuple or list of Op, or None.
Lowering = Callable[..., Any]
Target = torch._ops.OpOverload | torch._ops.HigherOrderOperator
_Function = TypeVar("_Function", bound=Lowering)

_LOWERINGS: dict[Target, Lowering] = {}
# By names of operations that nobody has defined yet.
_AWAITED: dict[str, Lowering] = {}


def lowering(*targets: Target | str, override: bool = False) -> Callable[[_Function], _Function]:
    """Registers the decorated function for overloads such as `torch.ops.aten.add.Tensor`, or for names such as
    "mylib::scale.default" of operations that a library defines when it is imported.

    `TypeError` for what is no overload (`torch.ops.aten.add` is a packet of several), `ValueError` for one that has a
    lowering already, unless `override`.
    """
    _load()
    for target in targets:
        if isinstance(target, str) and "::" in target and "." in target.partition("::")[2]:
            if target in _AWAITED and not override:
                raise ValueError(f"lowering: {target} has one already; pass override=True to replace it")
            continue
        if not isinstance(target, Target):
            overloads: list[str] = getattr(target, "overloads", list)()
            hint = f"; name one of its overloads: {', '.join(overloads)}" if overloads else ""
            raise TypeError(f"lowering: {target!r} is no overload of an operation{hint}")
        if target in _LOWERINGS and not override:
            raise ValueError(f"lowering: {target} has one already; pass override=True to replace it")

    def register(function: _Function) -> _Function:
        for target in targets:
            if isinstance(target, str):
                _AWAITED[target] = function
            else:
                _LOWERINGS[target] = function
        return function

    return register


def lowerings() -> Mapping[Target, Lowering]:
    """Every operation that can be lowered, with the function that does it."""
    _load()
    for name in [name for name in _AWAITED if find_target(name) is not None]:
        _LOWERINGS[find_target(name)] = _AWAITED.pop(name)  # type: ignore[index]
    return MappingProxyType(_LOWERINGS)


def find_target(name: str) -> Target | None:
    """The overload "namespace::operation.overload", if it is there."""
    namespace, _, rest = name.partition("::")
    operation, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), operation, None), overload, None)


_loading = False


def _load() -> None:
    """Imports the families of aten/, once."""
    global _loading
    if not _loading:
        _loading = True
        package = importlib.import_module("easytorch.frontend.aten")
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
