"""One run at a time in an output folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from easytorch.training.config import flag


@contextmanager
def only_run(output: Path) -> Iterator[None]:
    """Holds the lock of the folder, which ends with the process; `FileExistsError` where another run has it.

    Two runs would write into each other's data, metrics and checkpoints. Where folders cannot be locked, by the system
    or the file system, none is.
    """
    descriptor = os.open(output, os.O_RDONLY)
    try:
        if _is_taken(descriptor):
            raise FileExistsError(
                f"{flag('output')} {output}: another run is writing there; wait for its end, or give another folder"
            )
        yield
    finally:
        os.close(descriptor)


def _is_taken(descriptor: int) -> bool:
    try:
        import fcntl
    except ImportError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
