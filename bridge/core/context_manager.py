"""What is closed at the end of its `with` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """A base for open checkpoints: they state `close`, and are context managers by it."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of what is open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
