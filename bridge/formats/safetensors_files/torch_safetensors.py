"""safetensors with torch names: `model.safetensors`, or shards under `model.safetensors.index.json`.

Layout (huggingface/safetensors, "Format"): eight bytes with the header's length, little-endian, a JSON header
`{name: {"dtype", "shape", "data_offsets": [start, end]}, "__metadata__": {str: str}}`, then the data without holes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from easytorch.bridge.core.context_manager import ContextManager
from easytorch.bridge.core.in_parts import InParts
from easytorch.bridge.core.mapped import MappedFile
from easytorch.bridge.core.reader import Reader
from easytorch.bridge.core.tensor_info import MAX_RANK, TensorInfo
from easytorch.bridge.dtypes import NAMES_OF_CODES, SAFETENSORS_CODES
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.base import Layout, Source
from easytorch.bridge.formats.parallel_write import Elements, write_parts
from easytorch.bridge.formats.sharding import find, open_files, read_index, shard_names, split, write_index

# The limit of the format's own implementation.
HEADER_LIMIT = 100_000_000
_BROKEN = "download or save the file again"


class SafetensorsFile(ContextManager):
    """One open safetensors file: the header is read and checked, data is not read."""

    def __init__(self, path: Path, writable: bool = False) -> None:
        self._map = MappedFile(path, writable)
        self.files = (path,)
        try:
            header, self._start = self._header()
            self.metadata: Mapping[str, str] = self._metadata(header.pop("__metadata__", {}))
            self._offset: dict[str, int] = {}
            self.tensors: Mapping[str, TensorInfo] = {name: self._entry(name, entry) for name, entry in header.items()}
            self._check_layout()
        except BaseException:
            self.close()
            raise

    def _fail(self, message: str, tensor: str | None = None) -> CheckpointError:
        return CheckpointError(f"{message}; {_BROKEN}", file=self.files[0], tensor=tensor)

    def _header(self) -> tuple[dict[str, Any], int]:
        size = self._map.size
        length = int.from_bytes(self._map.bytes[:8], "little")
        if size < 8 or length > size - 8:
            raise self._fail(f"is truncated or not safetensors: a header of {length} bytes in a file of {size}")
        if length > HEADER_LIMIT:
            raise self._fail(f"the header claims {length} bytes, more than the format's {HEADER_LIMIT}")
        try:
            header = json.loads(self._map.bytes[8 : 8 + length], object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise self._fail(f"the header is not valid JSON ({error})") from error
        if not isinstance(header, dict):
            raise self._fail(f"the header is a JSON {type(header).__name__}, not an object")
        return header, 8 + length

    def _metadata(self, metadata: object) -> dict[str, str]:
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise self._fail("`__metadata__` is not a map of text to text")
        return metadata

    def _entry(self, name: str, entry: object) -> TensorInfo:
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise self._fail("the header entry does not have just `dtype`, `shape` and `data_offsets`", name)
        shape, offsets = entry["shape"], entry["data_offsets"]
        if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
            raise self._fail(f"shape {shape!r} and data_offsets {offsets!r} are not lists of sizes", name)
        dtype = NAMES_OF_CODES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
        if dtype is None:
            known = ", ".join(NAMES_OF_CODES)
            raise CheckpointError(
                f"dtype {entry['dtype']!r} is not known here; known: {known}", file=self.files[0], tensor=name
            )
        start, end = offsets
        info = TensorInfo(name, tuple(shape), dtype, str(self.files[0]))
        if end - start != info.nbytes:
            raise self._fail(
                f"{dtype} of shape {shape} takes {info.nbytes} bytes, data_offsets give {end - start}", name
            )
        self._offset[name] = start
        return info

    def _check_layout(self) -> None:
        end = 0
        for info in sorted(self.tensors.values(), key=lambda info: (self._offset[info.name], info.nbytes)):
            if self._offset[info.name] != end:
                raise self._fail(
                    f"its data starts at {self._offset[info.name]}, the one before ends at {end}", info.name
                )
            end += info.nbytes
        if end != self._map.size - self._start:
            raise self._fail(
                f"is truncated or padded: {end} bytes of data declared, {self._map.size - self._start} there"
            )

    def read(self, name: str) -> np.ndarray:
        """The elements; a view of the file where it is mapped."""
        return self.read_in_parts(name).whole()

    def read_in_parts(self, name: str) -> InParts:
        """The same, not read yet where the file is not mapped."""
        info = self.tensors[name]
        return InParts.of(self._map.elements(self._start + self._offset[name], info.shape, info.dtype))

    def close(self) -> None:
        """Lets go of the mapped file."""
        self._map.close()


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a name occurs twice")
    return content


def _naturals(values: object) -> bool:
    return (
        isinstance(values, list)
        and len(values) <= MAX_RANK
        and all(type(value) is int and 0 <= value < 2**63 for value in values)
    )


def storage_order(tensors: Sequence[TensorInfo]) -> list[TensorInfo]:
    """Widest element type first, then by name, as the format's own writer does, so that data stays aligned."""
    rank = {dtype: number for number, dtype in enumerate(SAFETENSORS_CODES)}
    for info in tensors:
        if info.dtype not in rank:
            raise CheckpointError(f"safetensors has no dtype {info.dtype}; cast it to one it has", tensor=info.name)
    return sorted(tensors, key=lambda info: (rank[info.dtype], info.name))


def write_file(path: Path, tensors: Sequence[TensorInfo], source: Source, metadata: Mapping[str, str]) -> None:
    """One file of `tensors`, in `storage_order`, with the elements `source` gives."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for info in tensors:
        offsets = [end, end + info.nbytes]
        header[info.name] = {"dtype": SAFETENSORS_CODES[info.dtype], "shape": info.shape, "data_offsets": offsets}
        end += info.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = len(text).to_bytes(8, "little") + text
    write_parts(path, [start, *map(Elements, tensors)], source)


def states_flax(file: Path) -> bool:
    """Whether a file, or the first shard of an index, declares Flax's names; a damaged one does not."""
    try:
        shard = file.parent / min(read_index(file).values()) if file.name.endswith(".index.json") else file
        with SafetensorsFile(shard) as one:
            return one.metadata.get("format") == "flax"
    except CheckpointError:
        return False


class TorchSafetensors:
    """The format torch models are saved in by transformers."""

    name = "torch safetensors"
    scheme = "torch"
    suffix = ".safetensors"
    file_name = "model.safetensors"

    def detect(self, path: Path) -> Path | None:
        """`model.safetensors.index.json`, else `model.safetensors`, in a folder; any `.safetensors` given as a file.

        None where that states Flax names (`flax_safetensors`).
        """
        found = find(path, self.file_name, suffixes=(".safetensors", ".safetensors.index.json"))
        return None if found is not None and states_flax(found) else found

    def open(self, file: Path, *, writable: bool = False) -> Reader:
        """The checkpoint behind an index or a single file."""
        return open_files(file, partial(SafetensorsFile, writable=writable))

    def layout(self, tensors: Sequence[TensorInfo], max_shard_size: int) -> Layout:
        """Shards by name, so that each holds neighbouring layers."""
        groups = split(sorted(tensors, key=lambda info: info.name), max_shard_size)
        files = shard_names(self.file_name, len(groups))
        return {file: storage_order(group) for file, group in zip(files, groups, strict=True)}

    def write(self, folder: Path, file: str, tensors: Sequence[TensorInfo], source: Source) -> None:
        """One file of the layout."""
        write_file(folder / file, tensors, source, {"format": "pt"})

    def finish(self, folder: Path, layout: Layout, source: Source) -> None:
        """The index, when there are several files."""
        if len(layout) > 1:
            write_index(folder / f"{self.file_name}.index.json", layout)

    def reads_back(self, info: TensorInfo, array: np.ndarray) -> np.ndarray:
        return array
