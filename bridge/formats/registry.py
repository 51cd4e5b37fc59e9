"""The formats there are, and which of them a path is in."""

from __future__ import annotations

from pathlib import Path

from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.base import Format, Naming, Reader, WritableFormat
from easytorch.bridge.formats.flax_msgpack import FlaxMsgpack
from easytorch.bridge.formats.torch_bin import TorchBin
from easytorch.bridge.formats.torch_safetensors import TorchSafetensors

# In order of preference where a folder holds several with the same names.
_FORMATS: dict[str, Format] = {}
# What `--to` accepts, and the format it writes.
TARGETS: dict[str, WritableFormat] = {"torch": TorchSafetensors(), "flax": FlaxMsgpack()}


def register(form: Format) -> None:
    """Makes a format known; a taken name is an error."""
    if form.name in _FORMATS:
        raise ValueError(f"a format called {form.name!r} is registered already; choose another name")
    _FORMATS[form.name] = form


for _format in (TARGETS["torch"], TorchBin(), TARGETS["flax"]):
    register(_format)


def target(name: str) -> WritableFormat:
    """The format written for `--to name`; `ValueError` listing the known names otherwise."""
    if name not in TARGETS:
        raise ValueError(f"cannot write {name!r}; known targets: {', '.join(TARGETS)}")
    return TARGETS[name]


def find(path: Path, *, prefer: Naming | None = None) -> tuple[Format, Path]:
    """The format `path` (a folder or a file) is in, and the file to open.

    Where a folder holds several, the one with the names of `prefer` is taken; without it those are an error. Of the
    same weights in two files with torch's names, as on the Hub, the safetensors are taken, as by transformers.
    """
    if not path.exists():
        raise CheckpointError("does not exist; give a checkpoint folder or a weight file", file=path)
    found: dict[Naming, tuple[Format, Path]] = {}
    for form in _FORMATS.values():
        if (file := form.detect(path)) is not None:
            found.setdefault(form.naming, (form, file))
    if not found:
        raise CheckpointError(f"no weights found; read here: {', '.join(_FORMATS)}", file=path)
    if prefer in found:
        return found[prefer]
    if len(found) > 1:
        files = ", ".join(file.name for _, file in found.values())
        raise CheckpointError(f"holds several checkpoints ({files}); give the path of the one to use", file=path)
    return next(iter(found.values()))


def open_checkpoint(path: Path, *, prefer: Naming | None = None, writable: bool = False) -> tuple[Format, Reader]:
    """`find`, opened."""
    form, file = find(path, prefer=prefer)
    return form, form.open(file, writable=writable)
