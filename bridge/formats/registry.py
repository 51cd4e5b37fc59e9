"""The registered formats, and which of them a path is in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, cast

from easytorch.bridge.core.reader import Reader
from easytorch.bridge.core.unsupported import refuse_adapter
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.base import Format, WritableFormat
from easytorch.bridge.formats.known import KNOWN, Known, names_at

# Whose weights a folder may hold side by side, as on the Hub: torch's, GGUF's, and a tree of arrays.
Kind = Literal["torch", "gguf", "tree"]
# What a path holds of each kind: the format, and the file to open.
Found = Mapping[Kind, tuple[Format, Path]]


_FORMATS: dict[str, Known] = {known.name: known for known in KNOWN}
# Checkpoints that an error lists.
_LISTED = 8


def register(format_: Format) -> None:
    """Registers a format; a taken name is an error."""
    if format_.name in _FORMATS:
        raise ValueError(f"a format called {format_.name!r} is registered already; choose another name")
    _FORMATS[format_.name] = Known(format_.name, ".*", lambda: format_)


def formats() -> list[Format]:
    """Every format that can be read."""
    return [known.make() for known in _FORMATS.values() if known.files is not None]


def _read() -> str:
    return ", ".join(known.name for known in _FORMATS.values() if known.files is not None)


def writable(name: str) -> WritableFormat:
    """The registered format `name`, which can be written."""
    return cast(WritableFormat, _FORMATS[name].make())


def kind_of(format_: Format) -> Kind:
    """The kind of weights in a format."""
    return "tree" if format_.scheme is None else "gguf" if format_.scheme == "gguf" else "torch"


def classify(path: Path) -> Found:
    """The formats that detect `path`, a folder or a file, by kind; empty where there is none.

    Of two files with torch's names, as on the Hub, safetensors is preferred, as in transformers.
    """
    found: dict[Kind, tuple[Format, Path]] = {}
    names = names_at(path)
    for known in _FORMATS.values():
        if known.may_be(names) and (file := (format_ := known.make()).detect(path)) is not None:
            found.setdefault(kind_of(format_), (format_, file))
    return found


def find(path: Path, *, prefer: Kind | None = None, found: Found | None = None) -> tuple[Format, Path]:
    """The format `path` (a folder or a file) is in, and the file to open.

    Where a folder holds several, the one of kind `prefer` is taken; without it they are an error.
    found: the result of `classify`, if it was called already.
    """
    if not path.exists():
        raise CheckpointError("does not exist; give a checkpoint folder or a weight file", file=path)
    if path.is_file():
        refuse_adapter(path)
    if found is None:
        found = classify(path)
    if not found:
        refuse_adapter(path)
        broken = sorted(file.name for file in path.iterdir() if not file.exists()) if path.is_dir() else []
        if broken:
            raise CheckpointError(
                f"no weights found, and links to nothing: {', '.join(broken)}; fetch it again", file=path
            )
        if inside := _inside(path):
            more = f" and {len(inside) - _LISTED} more" if len(inside) > _LISTED else ""
            listed = ", ".join(inside[:_LISTED])
            raise CheckpointError(
                f"no weights found in the folder itself; give the path of one that is inside: {listed}{more}", file=path
            )
        raise CheckpointError(f"no weights found; read here: {_read()}", file=path)
    if prefer is not None and prefer in found:
        return found[prefer]
    if len(found) > 1:
        files = ", ".join(file.name for _, file in found.values())
        raise CheckpointError(f"holds several checkpoints ({files}); give the path of the one to use", file=path)
    return next(iter(found.values()))


def _inside(folder: Path, depth: int = 2) -> list[str]:
    """The checkpoints in a folder of no format: folders and files whose names say nothing of which is meant."""
    found: list[str] = []
    for child in sorted(folder.iterdir()) if folder.is_dir() and os.access(folder, os.R_OK | os.X_OK) else []:
        if child.is_symlink() or child.name.startswith("."):
            continue
        if _holds_weights(child):
            found.append(child.name)
        elif depth > 1:
            found += [f"{child.name}/{name}" for name in _inside(child, depth - 1)]
    return found


def _holds_weights(path: Path) -> bool:
    if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
        return False
    try:
        return bool(classify(path))
    except CheckpointError:
        return True  # several of a format: there is something to choose from


def open_reader(path: Path, *, prefer: Kind | None = None, writable: bool = False) -> tuple[Format, Reader]:
    """`find`, opened."""
    format_, file = find(path, prefer=prefer)
    return format_, format_.open(file, writable=writable)
