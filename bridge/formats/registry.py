"""The formats there are, which of them a path is in, and what each `--to` writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from easytorch.bridge.core.reader import Reader
from easytorch.bridge.core.unsupported import refuse_adapter
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.base import Format, WritableFormat
from easytorch.bridge.formats.gguf_files.file import Gguf
from easytorch.bridge.formats.msgpack_files.easydel_msgpack import EasydelMsgpack
from easytorch.bridge.formats.msgpack_files.flax_msgpack import FlaxMsgpack
from easytorch.bridge.formats.numpy_files.npz import Npz
from easytorch.bridge.formats.orbax_trees.tree import OrbaxTree, OrbaxZarr
from easytorch.bridge.formats.safetensors_files.easydel_safetensors import EasydelSafetensors
from easytorch.bridge.formats.safetensors_files.flax_safetensors import FlaxSafetensors
from easytorch.bridge.formats.safetensors_files.torch_safetensors import TorchSafetensors
from easytorch.bridge.formats.torch_files.torch_bin import TorchBin
from easytorch.bridge.formats.torch_files.torch_dcp import TorchDcp
from easytorch.bridge.formats.zarr_folders.easydel_store import EasydelStore
from easytorch.bridge.formats.zarr_folders.t5x_folder import T5xFolder

# Whose weights a folder may hold side by side, as on the Hub: torch's, GGUF's, and a tree of arrays.
Kind = Literal["torch", "gguf", "tree"]
# What a path holds of each kind: the format, and the file to open.
Found = Mapping[Kind, tuple[Format, Path]]


@dataclass(frozen=True)
class Target:
    """What a `--to` writes: a container, and the naming scheme of what it holds."""

    format: WritableFormat
    scheme: str


# In order of preference where a folder holds several of one kind.
_FORMATS: dict[str, Format] = {}
# What `--to` accepts.
TARGETS: dict[str, Target] = {
    "torch": Target(TorchSafetensors(), "torch"),
    "flax": Target(FlaxMsgpack(), "flax"),
    "flax-safetensors": Target(FlaxSafetensors(), "flax"),
    "easydel": Target(EasydelStore(), "easydel"),
    "easydel-msgpack": Target(EasydelMsgpack(), "easydel"),
    "t5x": Target(T5xFolder(), "t5x"),
    "big_vision": Target(Npz(), "big_vision"),
    "dcp": Target(TorchDcp(), "torch"),
    "gguf": Target(Gguf(), "gguf"),
    "orbax": Target(OrbaxTree(), "flax"),
    "orbax-zarr": Target(OrbaxZarr(), "flax"),
    "maxtext": Target(OrbaxTree(), "maxtext"),
    "maxtext-unscanned": Target(OrbaxTree(), "maxtext-unscanned"),
    "gemma": Target(OrbaxTree(), "gemma"),
}


def register(format_: Format) -> None:
    """Makes a format known; a taken name is an error."""
    if format_.name in _FORMATS:
        raise ValueError(f"a format called {format_.name!r} is registered already; choose another name")
    _FORMATS[format_.name] = format_


for _format in (
    TARGETS["torch"].format,
    TorchBin(),
    TARGETS["dcp"].format,
    TARGETS["flax"].format,
    TARGETS["flax-safetensors"].format,
    TARGETS["gguf"].format,
    TARGETS["easydel"].format,
    TARGETS["easydel-msgpack"].format,
    EasydelSafetensors(),
    TARGETS["big_vision"].format,
    # Before Orbax, whose first checkpoints had a file of the same name.
    TARGETS["t5x"].format,
    TARGETS["orbax"].format,
):
    register(_format)


def formats() -> list[Format]:
    """Every format that is read here."""
    return list(_FORMATS.values())


def target_names() -> list[str]:
    """What `--to` accepts."""
    return list(TARGETS)


def target(name: str) -> Target:
    """What `--to name` writes; `ValueError` listing the known names otherwise."""
    if name not in TARGETS:
        raise ValueError(f"cannot write {name!r}; known targets: {', '.join(TARGETS)}")
    return TARGETS[name]


def kind_of(format_: Format) -> Kind:
    """Whose names the tensors of a format carry."""
    return "tree" if format_.scheme is None else "gguf" if format_.scheme == "gguf" else "torch"


def classify(path: Path) -> Found:
    """What every format says of `path`, a folder or a file: nothing where no format is found.

    Of the same weights in two files with torch's names, as on the Hub, the safetensors are taken, as by transformers.
    """
    found: dict[Kind, tuple[Format, Path]] = {}
    for format_ in _FORMATS.values():
        if (file := format_.detect(path)) is not None:
            found.setdefault(kind_of(format_), (format_, file))
    return found


def find(path: Path, *, prefer: Kind | None = None, found: Found | None = None) -> tuple[Format, Path]:
    """The format `path` (a folder or a file) is in, and the file to open.

    Where a folder holds several, that of the kind `prefer` is taken; without it those are an error.
    found: what `classify` has said of `path` already.
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
        raise CheckpointError(f"no weights found; read here: {', '.join(_FORMATS)}", file=path)
    if prefer is not None and prefer in found:
        return found[prefer]
    if len(found) > 1:
        files = ", ".join(file.name for _, file in found.values())
        raise CheckpointError(f"holds several checkpoints ({files}); give the path of the one to use", file=path)
    return next(iter(found.values()))


def open_reader(path: Path, *, prefer: Kind | None = None, writable: bool = False) -> tuple[Format, Reader]:
    """`find`, opened."""
    format_, file = find(path, prefer=prefer)
    return format_, format_.open(file, writable=writable)
