"""Flax msgpack: `flax_model.msgpack`, or shards under `flax_model.msgpack.index.json`; names are paths with "/".

Source: `FlaxPreTrainedModel.save_pretrained` of transformers 4.57 and flax.serialization.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from easytorch.bridge.core.context_manager import ContextManager
from easytorch.bridge.core.in_parts import InParts
from easytorch.bridge.core.mapped import MappedFile
from easytorch.bridge.core.nested import flat, nested
from easytorch.bridge.core.reader import Reader
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.base import Layout, Source
from easytorch.bridge.formats.msgpack_files.stream import CHUNK_MARK, tree_parts
from easytorch.bridge.formats.msgpack_files.walk import Located, Tree, Walk
from easytorch.bridge.formats.parallel_write import write_parts
from easytorch.bridge.formats.sharding import find, open_files, shard_names, split, write_index


class MsgpackFile(ContextManager):
    """One open msgpack file: an index of where each array stands, data mapped."""

    def __init__(self, path: Path, writable: bool = False) -> None:
        self._map = MappedFile(path, writable)
        self.files = (path,)
        self.metadata: Mapping[str, str] = {}
        self._parts: dict[str, list[Located]] = {}
        self._scalars: dict[str, np.ndarray] = {}
        tensors: dict[str, TensorInfo] = {}
        try:
            self._index(self._tree(Walk(path, self._map.bytes, self._map.size)), (), tensors)
        except BaseException:
            self.close()
            raise
        self.tensors: Mapping[str, TensorInfo] = tensors

    def _tree(self, walk: Walk) -> Tree:
        """The file's tree: all of it is one map."""
        return walk.tree()

    def _fail(self, message: str, name: str) -> CheckpointError:
        return CheckpointError(f"{message}; download or save the file again", file=self.files[0], tensor=name)

    def _index(self, tree: Tree, path: tuple[str, ...], tensors: dict[str, TensorInfo]) -> None:
        for key, child in tree.items():
            name = "/".join((*path, key))
            if isinstance(child, dict) and CHUNK_MARK not in child:
                self._index(child, (*path, key), tensors)
                continue
            if name in tensors:
                raise self._fail("two paths of the tree read the same", name)
            shape, dtype = self._leaf(name, child)
            tensors[name] = TensorInfo(name, shape, dtype, str(self.files[0]))

    def _leaf(self, name: str, child: object) -> tuple[tuple[int, ...], str]:
        if isinstance(child, dict):
            self._parts[name], shape = self._chunks(name, child)
            return shape, self._parts[name][0].dtype
        if isinstance(child, Located):
            self._parts[name] = [child]
            return child.shape, child.dtype
        if isinstance(child, bool | int | float | complex) and not _too_wide(child):
            self._scalars[name] = np.asarray(child)
            return (), self._scalars[name].dtype.name
        raise self._fail(f"holds {child!r}, which is not an array", name)

    def _chunks(self, name: str, node: Tree) -> tuple[list[Located], tuple[int, ...]]:
        shape, chunks = (self._listed(node.get(key)) for key in ("shape", "chunks"))
        if not chunks or not all(isinstance(part, Located) and part.dtype == chunks[0].dtype for part in chunks):
            raise self._fail("a chunked array has chunks that are not arrays of one dtype", name)
        if shape is None or not all(type(size) is int and size >= 0 for size in shape):
            raise self._fail("a chunked array has no proper shape", name)
        count = 1
        for size in shape:
            count *= size
        present = sum(part.shape[0] if len(part.shape) == 1 else -1 for part in chunks)
        if present != count:
            raise self._fail(f"its chunks hold {present} elements, its shape {shape} needs {count}", name)
        return chunks, tuple(shape)

    @staticmethod
    def _listed(node: object) -> list[Any] | None:
        """The values of `{"0": ..., "1": ...}`, how Flax keeps a tuple; None for anything else."""
        if not isinstance(node, dict) or any(str(number) not in node for number in range(len(node))):
            return None
        return [node[str(number)] for number in range(len(node))]

    def read(self, name: str) -> np.ndarray:
        """The elements; a view of the file where it is mapped, unless they stand there in several chunks."""
        return self.read_in_parts(name).whole()

    def read_in_parts(self, name: str) -> InParts:
        """The same, one part for each chunk, not read yet where the file is not mapped."""
        if name in self._scalars:
            return InParts.of(self._scalars[name])
        parts = [self._map.elements(part.start, part.shape, part.dtype) for part in self._parts[name]]
        return InParts.joined(parts, self.tensors[name].shape)

    def close(self) -> None:
        """Lets go of the mapped file."""
        self._map.close()


def _too_wide(value: complex) -> bool:
    return isinstance(value, int) and not -(2**63) <= value < 2**63


class FlaxMsgpack:
    """The format HF Flax models are saved in."""

    name = "Flax msgpack"
    scheme = None
    suffix = ".msgpack"
    file_name = "flax_model.msgpack"

    def detect(self, path: Path) -> Path | None:
        """`flax_model.msgpack.index.json`, else `flax_model.msgpack`, in a folder; any `.msgpack` given as a file."""
        return find(path, self.file_name, suffixes=(".msgpack", ".msgpack.index.json"))

    def open(self, file: Path, *, writable: bool = False) -> Reader:
        """The checkpoint behind an index or a single file."""
        return open_files(file, partial(MsgpackFile, writable=writable))

    def layout(self, tensors: Sequence[TensorInfo], max_shard_size: int) -> Layout:
        """The tensors in the order given, but with every subtree together, as a tree stores them."""
        groups = split(list(flat(_tree(tensors)).values()), max_shard_size)
        files = shard_names(self.file_name, len(groups))
        return {file: list(flat(_tree(group)).values()) for file, group in zip(files, groups, strict=True)}

    def write(self, folder: Path, file: str, tensors: Sequence[TensorInfo], source: Source) -> None:
        """One file of the layout."""
        write_parts(folder / file, tree_parts(_tree(tensors)), source)

    def finish(self, folder: Path, layout: Layout, source: Source) -> None:
        """The index, when there are several files."""
        if len(layout) > 1:
            write_index(folder / f"{self.file_name}.index.json", layout)

    def reads_back(self, info: TensorInfo, array: np.ndarray) -> np.ndarray:
        return array


def _tree(tensors: Sequence[TensorInfo]) -> dict[str, Any]:
    return nested({info.name: info for info in tensors})
