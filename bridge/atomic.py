"""A folder that is there whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from easytorch.bridge.errors import CheckpointError


def refuse_existing(destination: Path) -> None:
    """`CheckpointError` when something stands at `destination`, a broken link included."""
    if os.path.lexists(destination):
        raise CheckpointError("exists already; choose another destination or remove it first", file=destination)


@contextmanager
def new_folder(destination: Path, *, replace: bool = False) -> Iterator[Path]:
    """A temporary folder beside `destination`, flushed to disk and renamed to it when the block ends well.

    What stands at `destination` is an error, or, to `replace` it, stays until then.

    When the block raises, Ctrl-C included, the temporary folder is removed, and so are the parents that were made for
    it. A killed process leaves it behind, under a hidden name, and `destination` absent.
    """
    if not replace:
        refuse_existing(destination)
    made = [parent for parent in destination.parents if not os.path.lexists(parent)]
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        temporary = destination.with_name(f".{destination.name}.{secrets.token_hex(4)}.partial")
        temporary.mkdir()
    except OSError as error:
        _remove_empty(made)
        raise CheckpointError(f"cannot be written: {error.strerror}", file=destination) from error
    try:
        yield temporary
        _flush(temporary)
        if replace and destination.is_dir():
            shutil.rmtree(destination)
        refuse_existing(destination)
        temporary.rename(destination)
        _sync(destination.parent)
    except OSError as error:
        raise CheckpointError(f"cannot be written: {error.strerror or error}", file=destination) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        _remove_empty(made)


def _remove_empty(folders: list[Path]) -> None:
    """Removes those of `folders`, innermost first, that nobody has put anything into."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def _flush(folder: Path) -> None:
    for parent, _, files in os.walk(folder):
        for file in files:
            _sync(Path(parent, file))
        _sync(Path(parent))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
