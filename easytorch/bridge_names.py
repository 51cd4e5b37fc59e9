"""The functions of `easytorch.bridge` as its attributes, loaded on first use.

The folder has no `__init__.py` in which they could be named (docs/architecture.md, "Packaging"), so the namespace
package itself is given the attributes.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

FUNCTIONS = ("convert", "diff", "inspect", "load_tree", "save_tree")


class BridgePackage(ModuleType):
    """A module that finds `FUNCTIONS` in the submodules of the same names."""

    def __getattr__(self, name: str) -> Any:
        if name not in FUNCTIONS:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}; it has {', '.join(FUNCTIONS)}")
        return importlib.import_module(f"{self.__name__}.{name}")

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *FUNCTIONS})


def name_functions() -> None:
    """Gives `easytorch.bridge` its attributes; loads none of them."""
    importlib.import_module("easytorch.bridge").__class__ = BridgePackage
