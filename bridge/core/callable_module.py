"""Modules that are called like the one function they hold: `easytorch.bridge.convert(...)`.

`bridge/` can have no `__init__.py` (docs/architecture.md, "Packaging"), so there is no place where `convert` could be
made to mean the function and not the module of its name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def call_as(function: Callable[..., Any]) -> None:
    """Makes calling the module in which `function` stands call `function`."""

    class CallableModule(ModuleType):
        __wrapped__ = staticmethod(function)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    module = sys.modules[function.__module__]
    module.__class__ = CallableModule
    module.__doc__ = function.__doc__
