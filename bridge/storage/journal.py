"""The files of a conversion that are safely on disk, so that `--resume` need not write them again.

Lines of JSON beside the unfinished destination: the first identifies the conversion, each further one names a file that
was written and synced before its line. A file is the unit: rewriting one costs at most a shard of `max_shard_size`, and
half a file written by a format's library could not be trusted.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from easytorch.bridge.storage.fsync import flush, sync

# What identifies a conversion: plain JSON. The user is told which keys differ.
Key = Mapping[str, Any]


class Journal:
    """The open journal at `file` of the destination being written in `folder`; `finished` are its complete files."""

    def __init__(self, file: Path, folder: Path, key: Key) -> None:
        self._file = file
        self._folder = folder
        self._lock = threading.Lock()
        # What a killed writer left unfinished, half a line at the end included, is left out.
        entries = [entry for entry in _entries(file)[1:] if state_of(folder / entry["file"]) == entry["state"]]
        self.finished = {entry["file"] for entry in entries}
        # With its parents: their names may have been lost with the power, and the journal's not.
        folder.mkdir(parents=True, exist_ok=True)
        _keep_only(folder, self.finished)
        fresh = file.with_name(f"{file.name}.new")
        _append(fresh, [{"key": dict(key)}, *entries])
        fresh.replace(file)
        sync(file.parent)

    def finish(self, names: Collection[str]) -> None:
        """Syncs the files (or folders) `names` to disk and records that; thread-safe."""
        flush(self._folder / name for name in names)
        with self._lock:
            _append(self._file, [{"file": name, "state": state_of(self._folder / name)} for name in names])
            self.finished.update(names)


def differences(file: Path, key: Key) -> list[str] | None:
    """The parts of `key` in which the journal at `file` is another conversion's; None where there is no journal."""
    entries = _entries(file)
    if not entries:
        return None
    theirs, mine = entries[0]["key"], json.loads(json.dumps(dict(key)))
    return sorted(part for part in {*theirs, *mine} if theirs.get(part) != mine.get(part))


def _append(file: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    with file.open("a", encoding="utf-8") as stream:
        stream.writelines(json.dumps(entry) + "\n" for entry in entries)
        stream.flush()
        os.fsync(stream.fileno())


def _entries(file: Path) -> list[dict[str, Any]]:
    """The key and the finished files, up to the first incomplete line."""
    try:
        lines = file.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    entries: list[dict[str, Any]] = []
    for line in lines:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            break
        wanted = {"file": str, "state": list} if entries else {"key": dict}
        if not isinstance(entry, dict) or {name: type(value) for name, value in entry.items()} != wanted:
            break
        entries.append(entry)
    return entries


def state_of(path: Path) -> list[list[str | int]] | None:
    """Sizes and times of a file, or of every file in a folder by path; None when it does not exist."""
    if not path.exists():
        return None
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [
        [str(file.relative_to(path)), file.stat().st_size, file.stat().st_mtime_ns] for file in files if file.is_file()
    ]


def _keep_only(folder: Path, names: set[str]) -> None:
    """Removes everything below `folder` but `names`."""
    kept = [folder / name for name in names]
    for path in folder.iterdir():
        if path in kept:
            continue
        if any(path in file.parents for file in kept):
            _keep_only(path, {str(file.relative_to(path)) for file in kept if path in file.parents})
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
