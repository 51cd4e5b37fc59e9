"""The formats there are: what their checkpoints' files are called, and where the code of each is.

A format is imported when a path may be in it or it is to be written: the code of all of them takes longer to load than
the header of a checkpoint to read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from easytorch.bridge.formats.base import Format


@dataclass(frozen=True)
class Known:
    """A format by its `name`.

    `files` is what some file or folder of each of its checkpoints is called, a regular expression for the whole name,
    folders with a slash behind: only where there is one the format is asked (`detect`). None for one that is written
    here, and read as another is.
    """

    name: str
    files: str | None
    make: Callable[[], Format]

    def may_be(self, names: Collection[str]) -> bool:
        """Whether a path with these names can be in the format."""
        return self.files is not None and any(re.fullmatch(self.files, name) for name in names)


def names_at(path: Path) -> list[str]:
    """The argument of `Known.may_be`: the names in a folder, or the name of a file."""
    if not path.is_dir():
        return [path.name]
    with os.scandir(path) as entries:
        return [f"{entry.name}/" if os.path.isdir(entry.path) else entry.name for entry in entries]


@cache
def _torch_safetensors() -> Format:
    from easytorch.bridge.formats.safetensors_files.torch_safetensors import TorchSafetensors

    return TorchSafetensors()


@cache
def _torch_bin() -> Format:
    from easytorch.bridge.formats.torch_files.torch_bin import TorchBin

    return TorchBin()


@cache
def _torch_dcp() -> Format:
    from easytorch.bridge.formats.torch_files.torch_dcp import TorchDcp

    return TorchDcp()


@cache
def _flax_msgpack() -> Format:
    from easytorch.bridge.formats.msgpack_files.flax_msgpack import FlaxMsgpack

    return FlaxMsgpack()


@cache
def _flax_safetensors() -> Format:
    from easytorch.bridge.formats.safetensors_files.flax_safetensors import FlaxSafetensors

    return FlaxSafetensors()


@cache
def _gguf() -> Format:
    from easytorch.bridge.formats.gguf_files.file import Gguf

    return Gguf()


@cache
def _easydel_store() -> Format:
    from easytorch.bridge.formats.zarr_folders.easydel_store import EasydelStore

    return EasydelStore()


@cache
def _easydel_msgpack() -> Format:
    from easytorch.bridge.formats.msgpack_files.easydel_msgpack import EasydelMsgpack

    return EasydelMsgpack()


@cache
def _easydel_safetensors() -> Format:
    from easytorch.bridge.formats.safetensors_files.easydel_safetensors import EasydelSafetensors

    return EasydelSafetensors()


@cache
def _npz() -> Format:
    from easytorch.bridge.formats.numpy_files.npz import Npz

    return Npz()


@cache
def _t5x_folder() -> Format:
    from easytorch.bridge.formats.zarr_folders.t5x_folder import T5xFolder

    return T5xFolder()


@cache
def _orbax_tree() -> Format:
    from easytorch.bridge.formats.orbax_trees.tree import OrbaxTree

    return OrbaxTree()


@cache
def _orbax_zarr() -> Format:
    from easytorch.bridge.formats.orbax_trees.tree import OrbaxZarr

    return OrbaxZarr()


_SAFETENSORS = r".*\.safetensors(\.index\.json)?"
# In order of preference where a folder holds several of one kind.
KNOWN = (
    Known("torch safetensors", _SAFETENSORS, _torch_safetensors),
    Known("torch pickle", r".*\.(bin|bin\.index\.json|pt|pth|ckpt)", _torch_bin),
    Known("torch DCP", r"\.metadata|.*\.distcp|shard-.*\.safetensors", _torch_dcp),
    Known("Flax msgpack", r".*\.msgpack(\.index\.json)?", _flax_msgpack),
    Known("Flax safetensors", _SAFETENSORS, _flax_safetensors),
    Known("GGUF", r".*\.gguf", _gguf),
    Known("EasyDeL", r"tensorstore_index\.json|run-.*/", _easydel_store),
    Known("EasyDeL msgpack", r".*\.(easydel|easy)", _easydel_msgpack),
    Known("EasyDeL safetensors", r"easydel-model\.parameters(\..*)?", _easydel_safetensors),
    Known("npz", r".*\.npz", _npz),
    # Before Orbax, whose first checkpoints had a file of the same name.
    Known("T5X", r"checkpoint|checkpoint_.*/", _t5x_folder),
    # Its items and steps are folders of any name.
    Known("Orbax", r"_METADATA|_CHECKPOINT_METADATA|manifest\.ocdbt|checkpoint|.*/", _orbax_tree),
    Known("Orbax zarr", None, _orbax_zarr),
)
