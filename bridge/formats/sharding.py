"""Checkpoints of several files and their `*.index.json`: `{"metadata": {...}, "weight_map": {tensor: file}}`.

Source: transformers, `save_pretrained` of its torch and (up to 4.57) Flax models; the layout is the same in both.
As in `from_pretrained`, every tensor of the shards that an index names is read, even one that it does not list, and
files it does not name are ignored; but if one of those has the name of a missing part of the same set, tensors would be
lost silently, so that is an error. Shards may be links, as in the Hub's cache; their names are plain.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from easytorch.bridge.core.context_manager import ContextManager
from easytorch.bridge.core.in_parts import InParts, read_in_parts
from easytorch.bridge.core.json_files import read_json
from easytorch.bridge.core.reader import PartialReader, Reader
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.errors import CheckpointError, nearest

_INDEX_LIMIT = 256 << 20
_PART = re.compile(r"(?P<set>.+)-\d+(?P<rest>-of-\d+\..+)")


def read_index(index: Path) -> dict[str, str]:
    """Tensor -> file name. The names are plain file names: a path that leaves the folder is refused."""
    content = read_json(index, limit=_INDEX_LIMIT)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            "the index has no `weight_map` of tensors to files; save the checkpoint again", file=index
        )
    for tensor, file in weight_map.items():
        if not is_plain_name(file):
            raise CheckpointError(
                f"the index names the file {file!r}, which is not a plain file name beside it; correct the index",
                file=index,
                tensor=tensor,
            )
    return weight_map


def is_plain_name(file: object) -> bool:
    """Whether `file` is a plain file name, not a path."""
    if not isinstance(file, str) or file in ("", ".", "..") or set(file) & set("/\\:\0"):
        return False
    try:
        # File systems' limit on names; lone surrogates cannot be encoded at all.
        return len(os.fsencode(file)) <= 255
    except UnicodeEncodeError:
        return False


class ShardedReader(ContextManager):
    """The shards of an index as one checkpoint."""

    def __init__(self, index: Path, open_shard: Callable[[Path], Reader]) -> None:
        self._index = index
        self._shards: list[Reader] = []
        self._home: dict[str, Reader] = {}
        try:
            self._open(read_index(index), open_shard)
        except BaseException:
            self.close()
            raise

    def _open(self, weight_map: Mapping[str, str], open_shard: Callable[[Path], Reader]) -> None:
        found: dict[str, TensorInfo] = {}
        for file in sorted(set(weight_map.values())):
            path = self._index.parent / file
            if not path.is_file():
                raise CheckpointError(f"the shard {file!r} is missing; download or copy it again", file=self._index)
            shard = open_shard(path)
            self._shards.append(shard)
            for name, info in shard.tensors.items():
                if name in found:
                    raise CheckpointError(f"stands in {found[name].file} and again in {path}", file=path, tensor=name)
                found[name] = info
                self._home[name] = shard
        partial = [shard.left_out for shard in self._shards if isinstance(shard, PartialReader)]
        self.left_out = tuple(dict.fromkeys(name for names in partial for name in names))
        self._refuse_unnamed_parts(set(weight_map.values()))
        for name, file in weight_map.items():
            if name not in found or Path(found[name].file).name != file:
                raise CheckpointError(
                    f"the index places it in {file!r}, which does not hold it{nearest(name, found)}",
                    file=self._index,
                    tensor=name,
                )
        self.tensors: Mapping[str, TensorInfo] = found
        self.metadata: Mapping[str, str] = self._shards[0].metadata
        self.files = (self._index, *(file for shard in self._shards for file in shard.files))

    def _refuse_unnamed_parts(self, named: set[str]) -> None:
        sets = {part.group("set", "rest") for file in named if (part := _PART.fullmatch(file)) is not None}
        for path in sorted(self._index.parent.iterdir()):
            part = _PART.fullmatch(path.name)
            if path.name not in named and part is not None and part.group("set", "rest") in sets:
                raise CheckpointError(
                    f"is a part of this checkpoint by its name, and {self._index.name} names no tensor of it; download "
                    "the index again, or remove the file",
                    file=path,
                )

    def read(self, name: str) -> np.ndarray:
        """The data of one tensor, from the shard that holds it."""
        return self._home[name].read(name)

    def read_in_parts(self, name: str) -> InParts:
        """`read`, with the tensor in parts where its shard gives parts."""
        return read_in_parts(self._home[name], name)

    def close(self) -> None:
        for shard in self._shards:
            shard.close()


def open_files(file: Path, open_one: Callable[[Path], Reader]) -> Reader:
    """The checkpoint behind an index, or behind a single file."""
    return ShardedReader(file, open_one) if file.name.endswith(".index.json") else open_one(file)


def find(path: Path, file_name: str, *, suffixes: tuple[str, ...]) -> Path | None:
    """In a folder the index of `file_name`, else `file_name` itself; a file given by its path if a suffix fits."""
    if path.is_file():
        return path if path.name.endswith(suffixes) else None
    return next((file for file in (path / f"{file_name}.index.json", path / file_name) if file.is_file()), None)


def split(
    tensors: Sequence[TensorInfo], max_shard_size: int, size: Callable[[TensorInfo], int] = lambda info: info.nbytes
) -> list[list[TensorInfo]]:
    """Consecutive groups of at most `max_shard_size` bytes; a larger tensor gets a group of its own.

    size: what a tensor takes in the file.
    """
    groups: list[list[TensorInfo]] = [[]]
    filled = 0
    for tensor in tensors:
        taken = size(tensor)
        if groups[-1] and filled + taken > max_shard_size:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += taken
    return groups


def shard_names(pattern: str, count: int) -> list[str]:
    """`model.safetensors` for one shard, `model-00001-of-00003.safetensors` ... for more."""
    if count == 1:
        return [pattern]
    stem, suffix = pattern.rsplit(".", 1)
    return [f"{stem}-{number:05d}-of-{count:05d}.{suffix}" for number in range(1, count + 1)]


def write_index(index: Path, shards: Mapping[str, Sequence[TensorInfo]]) -> None:
    """The index of `shards` (file name -> tensors), in the layout transformers writes."""
    content = {
        "metadata": {"total_size": sum(tensor.nbytes for group in shards.values() for tensor in group)},
        "weight_map": {tensor.name: file for file, group in shards.items() for tensor in group},
    }
    index.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
