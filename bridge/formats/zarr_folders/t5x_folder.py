"""T5X's own checkpoints: a msgpack file `checkpoint` that says where each array is, and a zarr folder for every array.

Source: google-research/t5x, `t5x/checkpoints.py` (`Checkpointer.save`, `load_t5x_checkpoint`), version 3:
`{"version": 3, "optimizer": {"target": parameters, "state": {...}}}`, each array replaced by its tensorstore spec with
a path beside the file (`target.encoder.layers_0...`). What T5X wrote through early Orbax has `PLACEHOLDER://path` in
the same place. Small arrays may stand in the file itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from easytorch.bridge.core.context_manager import ContextManager
from easytorch.bridge.core.nested import nested
from easytorch.bridge.core.reader import Reader
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.formats.array_chunks import chunk_shape
from easytorch.bridge.formats.base import Layout, Source
from easytorch.bridge.formats.msgpack_files.flax_msgpack import MsgpackFile
from easytorch.bridge.formats.msgpack_files.walk import Tree, Walk
from easytorch.bridge.formats.zarr_folders.arrays import ZarrFolders, check_names, write_folder

INDEX = "checkpoint"
_STEP = re.compile(r"checkpoint_(\d{1,18})")
_PLACEHOLDER = "PLACEHOLDER://"
# Since version 1 the training state is wrapped in this.
_WRAPPER = "optimizer/"


class _Index(MsgpackFile):
    """The file `checkpoint`: its own arrays, and the `folders` of the others."""

    def _tree(self, walk: Walk) -> Tree:
        self.folders: dict[str, str] = {}
        texts: dict[str, str] = {}
        tree = walk.tree()
        self._take(tree, "", texts)
        self.metadata = texts
        return tree

    def _take(self, tree: Tree, prefix: str, texts: dict[str, str]) -> None:
        """Moves what is no array of this file out of `tree`."""
        for key, child in list(tree.items()):
            name = prefix + key
            if isinstance(child, dict) and isinstance(child.get("driver"), str):
                self.folders[name] = self._folder(child, name)
            elif isinstance(child, str) and child.startswith(_PLACEHOLDER):
                self.folders[name] = child.removeprefix(_PLACEHOLDER)
            elif child is None or isinstance(child, str) or name == "version":
                texts[name] = str(child)
            else:
                if isinstance(child, dict):
                    self._take(child, f"{name}/", texts)
                continue
            del tree[key]

    def _folder(self, spec: dict[str, Any], name: str) -> str:
        """The array's path in a TensorStore spec; before tensorstore 0.1.14 the key was one level higher."""
        store = spec.get("kvstore")
        path = store.get("path", spec.get("path")) if isinstance(store, dict) else None
        if not isinstance(path, str):
            raise self._fail("its tensorstore spec has no path", name)
        return path.removesuffix("/")


class T5xReader(ContextManager):
    """One open checkpoint: parameters under "target/", the optimizer's state under "state/"."""

    def __init__(self, index: Path) -> None:
        self._index = _Index(index)
        try:
            self._arrays = ZarrFolders(index.parent, self._index.folders, index)
            infos = {**self._index.tensors, **self._arrays.tensors}
        except BaseException:
            self._index.close()
            raise
        self._names = {name.removeprefix(_WRAPPER): name for name in infos}
        self.tensors: Mapping[str, TensorInfo] = {
            path: replace(infos[name], name=path) for path, name in self._names.items()
        }
        self.metadata = self._index.metadata
        self.files = (index, *(index.parent / folder for folder in self._index.folders.values()))

    def read(self, name: str) -> np.ndarray:
        """The data of one tensor; of one inside the msgpack file a view."""
        stored = self._names[name]
        return self._arrays.read(stored) if stored in self._arrays.tensors else self._index.read(stored)

    def close(self) -> None:
        """Lets go of the msgpack file."""
        self._index.close()


class T5xFolder:
    """The format T5X trains in."""

    name = "T5X"
    scheme = None
    usual_scheme = "t5x"
    suffix: str | None = None

    def detect(self, path: Path) -> Path | None:
        """The file `checkpoint` beside folders of parameters; in a model's folder that of its last step."""
        if path.is_file():
            return path if path.name == INDEX and _has_parameters(path.parent) else None
        if (path / INDEX).is_file():
            return path / INDEX if _has_parameters(path) else None
        steps = {int(found[1]): one for one in path.glob("checkpoint_*") if (found := _STEP.fullmatch(one.name))}
        files = [file for step in sorted(steps) if steps[step].is_dir() and (file := self.detect(steps[step]))]
        return files[-1] if files else None

    def open(self, file: Path, *, writable: bool = False) -> Reader:
        """The checkpoint behind the file `checkpoint`."""
        return T5xReader(file)

    def layout(self, tensors: Sequence[TensorInfo], max_shard_size: int) -> Layout:
        """One folder per tensor, its path joined by dots."""
        check_names(list(tensors), self.name)
        nested({info.name: info for info in tensors})
        return {info.name.replace("/", "."): [info] for info in tensors}

    def write(self, folder: Path, file: str, tensors: Sequence[TensorInfo], source: Source) -> None:
        for info in tensors:
            write_folder(folder / file, info, source.read(info.name))
            source.wrote(info)

    def finish(self, folder: Path, layout: Layout, source: Source) -> None:
        """The file `checkpoint`."""
        specs = {info.name: _spec(file, info) for file, (info,) in layout.items()}
        state = {"state": {"step": 0}, **nested(specs)}
        (folder / INDEX).write_bytes(msgpack.packb({"version": 3, "optimizer": state}))

    def reads_back(self, info: TensorInfo, array: np.ndarray) -> np.ndarray:
        return array


def _has_parameters(folder: Path) -> bool:
    return any(one.is_dir() for root in ("target", "state", "_optimizer") for one in folder.glob(f"{root}.*"))


def _spec(file: str, info: TensorInfo) -> dict[str, Any]:
    """The tensorstore spec of an array, as `Checkpointer` leaves it: everything but what is read off `.zarray`."""
    metadata = {"chunks": list(chunk_shape(info)), "compressor": None, "shape": list(info.shape)}
    kvstore = {"driver": "file", "path": f"{file}/"}
    return {"driver": "zarr", "dtype": info.dtype, "kvstore": kvstore, "metadata": metadata}
