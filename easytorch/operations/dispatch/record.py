"""Which operations are called, for pages and commands that say so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from easytorch.operations.dispatch.impl import OperationImpl


@contextmanager
def recorded_operations() -> Iterator[set[str]]:
    """The names, as in the registry, of the operations that this process calls within."""
    called: set[str] = set()
    call = OperationImpl.__call__

    def noted(self: OperationImpl, *args: Any, **kwargs: Any) -> Any:
        called.add(self.primary_name())
        return call(self, *args, **kwargs)

    OperationImpl.__call__ = noted  # type: ignore[method-assign]
    try:
        yield called
    finally:
        OperationImpl.__call__ = call  # type: ignore[method-assign]
