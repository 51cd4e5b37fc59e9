"""Programs of torch.export name our operators and output types: they are registered when one is about to be loaded.

`import easytorch` imports no torch, and torch is told nothing of a library's operators until it is imported. torch
imports its reader of saved programs when it first reads or writes one; what this finder does is import our operators
before that.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

READER = "torch._export.serde.serialize"  # torch 2.9 to 2.13

# Where operators are registered that work without a GPU or TPU, beside those that easytorch.operations imports.
OPERATORS = (
    "easytorch.operations",
    "easytorch.kernels.attention.jax_op",
    "easytorch.kernels.blocksparse.aten_op",
    "easytorch.kernels.ragged_page.write",
    "easytorch.kernels.ring.operators",
)


class RegisterOperators:
    """A finder of `sys.meta_path` that finds nothing; the first time READER is asked for it imports OPERATORS."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name == READER:
            sys.meta_path.remove(self)
            register_operators()


def register_operators() -> None:
    """Imports what a saved program may name."""
    for module in OPERATORS:
        importlib.import_module(module)


def register_when_needed() -> None:
    """Now if torch has read or written a program already, else when it first does."""
    if READER in sys.modules:
        register_operators()
    else:
        sys.meta_path.insert(0, RegisterOperators())
