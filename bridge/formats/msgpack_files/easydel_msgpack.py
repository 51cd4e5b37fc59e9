"""EasyDeL's old single file (`.easydel`, `.easy`): msgpack pairs of a leaf's keys and its bytes, one after the other.

Source: FJFormer 0.0.22 to 0.0.80, `checkpoint/streamer.py` (`save_state_to_file`), which is EasyLM's
`StreamingCheckpointer`: `packer.pack((key, flax.serialization.to_bytes(value)))` for every leaf of the flattened state.
An `EasyDeLState` holds text beside its arrays (`hyperparameters`, `module_config_args`): that is metadata here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from easytorch.bridge.core.nested import nested
from easytorch.bridge.core.reader import Reader
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.base import Layout, Source
from easytorch.bridge.formats.msgpack_files.flax_msgpack import MsgpackFile
from easytorch.bridge.formats.msgpack_files.stream import pair_parts
from easytorch.bridge.formats.msgpack_files.walk import Tree, Walk
from easytorch.bridge.formats.parallel_write import write_parts

_SUFFIXES = (".easydel", ".easy")
# Every value is one msgpack object of less than 4 GiB, the frames of its chunks included.
_LARGEST = 2**32 - 2**16


class EasydelMsgpackFile(MsgpackFile):
    """One open file: an index of where each array stands, data mapped."""

    def _tree(self, walk: Walk) -> Tree:
        tree = walk.stream()
        texts: dict[str, str] = {}
        _take_texts(tree, "", texts)
        self.metadata = texts
        return tree


def _take_texts(tree: Tree, prefix: str, texts: dict[str, str]) -> None:
    """Moves what is no array (text, None) out of `tree`."""
    for key, child in list(tree.items()):
        if isinstance(child, dict):
            _take_texts(child, f"{prefix}{key}/", texts)
        elif child is None or isinstance(child, str):
            texts[prefix + key] = json.dumps(child)
            del tree[key]


class EasydelMsgpack:
    """The format EasyDeL saved states in until it took safetensors (2024) and tensorstore (2025)."""

    name = "EasyDeL msgpack"
    scheme = None
    usual_scheme = "easydel"
    suffix: str | None = ".easydel"
    file_name = "model.easydel"

    def detect(self, path: Path) -> Path | None:
        """`model.easydel` of a folder, else the only `.easydel` or `.easy` there; any given as a file."""
        if path.is_file():
            return path if path.suffix in _SUFFIXES else None
        if (path / self.file_name).is_file():
            return path / self.file_name
        found = [file for suffix in _SUFFIXES for file in path.glob(f"*{suffix}") if file.is_file()]
        return found[0] if len(found) == 1 else None

    def open(self, file: Path, *, writable: bool = False) -> Reader:
        return EasydelMsgpackFile(file, writable)

    def layout(self, tensors: Sequence[TensorInfo], max_shard_size: int) -> Layout:
        """One file, whatever its size; `CheckpointError` for an array of 4 GiB, which msgpack cannot hold."""
        nested({info.name: info for info in tensors})
        for info in tensors:
            if info.nbytes >= _LARGEST:
                raise CheckpointError(
                    f"has {info.nbytes} bytes, and EasyDeL's msgpack holds less than 4 GiB each; write another one",
                    tensor=info.name,
                )
        return {self.file_name: list(tensors)}

    def write(self, folder: Path, file: str, tensors: Sequence[TensorInfo], source: Source) -> None:
        write_parts(folder / file, pair_parts(tensors), source)

    def finish(self, folder: Path, layout: Layout, source: Source) -> None:
        """Nothing stands beside the file."""

    def reads_back(self, info: TensorInfo, array: np.ndarray) -> np.ndarray:
        return array
