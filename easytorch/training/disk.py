"""File errors of any library as `OSError` with the file's name."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

from easytorch.bridge.storage.fsync import os_error_of


class named_os_errors(AbstractContextManager[None]):
    """A context in which the operating system's errors name `path`; those that torch, safetensors and tokenizers wrap
    (a full disk is a `RuntimeError`, a `SafetensorError`, an `Exception`) are raised as the `OSError` that they hold.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception) or (isinstance(error, OSError) and error.filename is not None):
            return
        if (cause := os_error_of(error)) is not None and cause.errno is not None:
            raise OSError(cause.errno, cause.strerror, str(self.path)) from error
