"""A base class for objects that are closed at the end of their `with` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class ContextManager(ABC):
    """Open checkpoints derive from it: they define `close`, which makes them context managers."""

    @abstractmethod
    def close(self) -> None:
        """Releases the open files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
