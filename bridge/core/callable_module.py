"""Modules that can be called like the one function they define: `easytorch.bridge.convert(...)`.

`bridge/` can have no `__init__.py` (docs/architecture.md, "Packaging"), so nothing could bind `convert` to the function
instead of the module of that name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def call_as(function: Callable[..., Any]) -> None:
    """Makes the module that defines `function` callable as `function`."""

    class CallableModule(ModuleType):
        __wrapped__ = staticmethod(function)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    module = sys.modules[function.__module__]
    module.__class__ = CallableModule
    module.__doc__ = function.__doc__
