"""One run at a time in an output folder."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from easytorch.training.config import flag


@contextmanager
def only_run(output: Path, file: Path | None = None) -> Iterator[None]:
    """Holds the lock of the folder, or of a file in it, which ends with the process; `FileExistsError` where another
    run has it.

    Two runs would write into each other's data, metrics and checkpoints. Where folders cannot be locked, by the system
    or the file system, none is.
    """
    descriptor = _opened(output if file is None else file)
    try:
        if descriptor is not None and _is_taken(descriptor):
            raise FileExistsError(
                f"{flag('output')} {output}: another run is writing there; wait for its end, or give another folder"
            )
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _opened(path: Path) -> int | None:
    if importlib.util.find_spec("fcntl") is None:  # Windows, which opens no folder either
        return None
    try:
        return os.open(path, os.O_RDONLY)
    except PermissionError:  # one that may be written into and not be listed
        return None


def _is_taken(descriptor: int) -> bool:
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
