"""A destination, a folder or a file, that is complete or absent, however its writer ends.

It is written in a hidden folder beside the destination (`staging_folder.py`), synced to disk and renamed. An error,
Ctrl-C included, removes that folder; a killed process leaves it, and the next run to the same destination removes it
or resumes from it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from easytorch.bridge.core.interruptions import INTERRUPTIONS, interruption_of
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.storage.exchange import exchange, rename_new
from easytorch.bridge.storage.fsync import flush, os_error_of, sync
from easytorch.bridge.storage.journal import Journal, Key, differences
from easytorch.bridge.storage.staging_folder import StagingFolder, left_behind, make


def refuse_existing(destination: Path) -> None:
    """`CheckpointError` when `destination` exists, even as a broken link."""
    if os.path.lexists(destination):
        raise CheckpointError("exists already; choose another destination or remove it first", file=destination)


@dataclass
class Staging:
    """A destination being written, in `folder`. `notes` say what killed runs had left."""

    folder: Path
    journal: Journal | None
    notes: list[str] = field(default_factory=list)


@contextmanager
def new_folder(destination: Path, *, replace: bool = False) -> Iterator[Path]:
    """A folder to fill, which becomes `destination` when the block succeeds.

    An existing `destination` is an error, or, with `replace`, stays until the new one takes its place.
    """
    with staged(destination, replace=replace) as staging:
        yield staging.folder


@contextmanager
def new_file(destination: Path, name: str, *, replace: bool = False) -> Iterator[Path]:
    """A folder into which the block writes the file `name`, which becomes `destination`; else as `new_folder`."""
    with staged(destination, name, replace=replace) as staging:
        yield staging.folder


@contextmanager
def staged(
    destination: Path,
    file: str | None = None,
    *,
    replace: bool = False,
    key: Key | None = None,
    resume: bool = False,
) -> Iterator[Staging]:
    """A folder to fill, which (or whose `file`) becomes `destination` when the block succeeds.

    key: identifies the conversion, so that finished files are journalled. `resume` continues from the finished files of
    a killed run with the same key; when this one is interrupted (not by an error), its finished files stay.
    `CheckpointError` for an existing destination and for write errors; `destination` is then unchanged.
    """
    outer = sys.exception()
    found, notes = _sweep(destination, key if resume else None)
    if not replace and os.path.lexists(destination):
        if found is not None:
            found.remove()
        refuse_existing(destination)
    made = [parent for parent in destination.parents if not os.path.lexists(parent)]
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        staging_folder = make(destination) if found is None else found
    except OSError as error:
        _remove_empty(made)
        raise CheckpointError(f"cannot be written: {error.strerror}", file=destination) from error
    except BaseException:
        _remove_empty(made)
        raise
    keep = False
    try:
        journal = None if key is None else Journal(staging_folder.journal, staging_folder.folder, key)
        yield Staging(staging_folder.folder, journal, notes)
        complete = staging_folder.folder if file is None else staging_folder.folder / file
        flush([complete])
        _publish(complete, staging_folder, destination, replace)
        sync(destination.parent)
    except CheckpointError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        if (interruption := interruption_of(error, outer)) is not None:
            keep = resume
            raise interruption from None
        if (cause := os_error_of(error, outer)) is None:
            raise
        raise CheckpointError(f"cannot be written: {cause.strerror or cause}", file=destination) from error
    except INTERRUPTIONS:
        keep = resume
        raise
    finally:
        if keep:
            staging_folder.release()
        else:
            staging_folder.remove()
        _remove_empty(made)


def sweep(destination: Path) -> list[str]:
    """Removes what killed runs to this destination left; returns notes on it."""
    return _sweep(destination, None)[1]


def _sweep(destination: Path, key: Key | None) -> tuple[StagingFolder | None, list[str]]:
    """`sweep`, but the folder of the same conversion (`key`) is kept and returned."""
    dead, living = left_behind(destination)
    notes = [f"{root}: another process is writing to the same destination" for root in living]
    found = None
    for staging_folder in dead:
        differing = None if key is None else differences(staging_folder.journal, key)
        if staging_folder.finish_exchange(destination):
            notes.append(f"{destination}: a killed run had finished writing it; moved into place now")
        elif differing == [] and found is None:
            notes.append(f"{staging_folder.root}: resumed; a killed run left it")
            found = staging_folder
            continue
        elif differing:
            other = " and ".join(differing)
            notes.append(
                f"{staging_folder.root}: removed; a killed run with another {other} left it, so nothing is resumed"
            )
        else:
            notes.append(f"{staging_folder.root}: removed; a killed run left it")
        staging_folder.remove()
    return found, notes


def _publish(complete: Path, staging_folder: StagingFolder, destination: Path, replace: bool) -> None:
    if not replace or not os.path.lexists(destination):
        try:
            rename_new(complete, destination)
        except FileExistsError:
            refuse_existing(destination)
            raise
        return
    if complete.is_dir() != destination.is_dir():
        refuse_existing(destination)
    if complete.is_file():
        complete.replace(destination)
        return
    # From here on `staging_folder.folder` may be the old one, from which no run may resume.
    staging_folder.journal.unlink(missing_ok=True)
    if not exchange(complete, destination):
        staging_folder.old.parent.mkdir()
        destination.rename(staging_folder.old)
        complete.rename(destination)


def _remove_empty(folders: list[Path]) -> None:
    """Removes those of `folders`, innermost first, that nobody has put anything into."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()
