"""`.metadata` of a torch.distributed.checkpoint folder: which tensors there are, and where each piece of them stands.

It is a pickle of torch's own classes, and read as plain data (`inert_pickle`): torch's reader unpickles it freely.
Source: torch.distributed.checkpoint of torch 2.13 (metadata.py, filesystem.py), and the names it had since 2.0.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from easytorch.bridge.core.tensor_info import MAX_RANK
from easytorch.bridge.dtypes import is_dtype
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.sharding import is_plain_name
from easytorch.bridge.formats.torch_files.inert_pickle import Made, Name, read_pickle

# A piece takes about 200 bytes: this is a thousand tensors on a thousand ranks.
_LIMIT = 256 << 20
_DCP = r"torch\.distributed\.checkpoint\."
_ALLOWED = re.compile(
    rf"{_DCP}metadata\.(Metadata|(Tensor|Bytes|Chunk)StorageMetadata|TensorProperties|MetadataIndex|StorageMeta"
    r"|_MEM_FORMAT_ENCODING)"
    rf"|{_DCP}filesystem\.(_StorageInfo|_StoragePrefix)|torch\.distributed\._shard\.sharded_tensor\.metadata\.\w+"
    r"|torch\.(Size|float\w+|bfloat16|u?int\w+|bool|complex\w+|strided)|torch\.serialization\._get_layout"
    r"|collections\.OrderedDict|pathlib(\._local)?\.(Pure)?(Posix|Windows)?Path"
)
_AGAIN = "save the checkpoint again"


@dataclass(frozen=True)
class Piece:
    """Part of a tensor: where in it, how large, and which bytes of which file it is saved in."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass
class Saved:
    """A tensor of the checkpoint. `path` are the keys under which it stood in the state dict."""

    shape: tuple[int, ...]
    dtype: str
    path: tuple[str, ...]
    pieces: list[Piece] = field(default_factory=list)


def read_metadata(file: Path) -> tuple[dict[str, Saved], list[tuple[str, ...]]]:
    """The tensors by name, and the paths of what is no tensor; `CheckpointError` where they do not fit together."""
    try:
        with file.open("rb") as stream:
            data = stream.read(_LIMIT + 1)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", file=file) from error
    if len(data) > _LIMIT:
        raise CheckpointError(f"is larger than {_LIMIT} bytes, too large for what it should be", file=file)
    value = read_pickle(data, file, lambda dotted: _ALLOWED.fullmatch(dotted) is not None)
    try:
        return _Metadata(file).read(value)
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"does not describe a checkpoint ({error}); {_AGAIN}", file=file) from error


class _Metadata:
    def __init__(self, file: Path) -> None:
        self._file = file

    def _fail(self, message: str, name: str) -> CheckpointError:
        return CheckpointError(f"{message}; {_AGAIN}", file=self._file, tensor=name)

    def read(self, value: Any) -> tuple[dict[str, Saved], list[tuple[str, ...]]]:
        root = _made(value, "Metadata").fields
        paths = root.get("planner_data")
        paths = paths if isinstance(paths, dict) else {}
        found: dict[str, Saved] = {}
        others: list[tuple[str, ...]] = []
        for name, entry in root["state_dict_metadata"].items():
            if isinstance(entry, Made) and entry.name.endswith(".TensorStorageMetadata"):
                found[name] = self._tensor(name, entry.fields, _path(paths.get(name), name))
            else:
                others.append(_path(paths.get(name), name))
        places = {}
        for index, info in root["storage_data"].items():
            where = _made(index, "MetadataIndex").fields
            offsets = where.get("offset")
            if not isinstance(where["fqn"], str):
                raise ValueError("a place of no tensor")
            places[where["fqn"], None if offsets is None else _sizes(offsets)] = _made(info, "_StorageInfo").fields
        for name, saved in found.items():
            saved.pieces = [self._placed(name, piece, places) for piece in saved.pieces]
            check_whole(saved, name, self._file)
        return found, others

    def _tensor(self, name: str, fields: dict[str, Any], path: tuple[str, ...]) -> Saved:
        shape = _sizes(fields["size"])
        state = _made(fields["properties"], "TensorProperties").state
        kind = state.get("dtype") if isinstance(state, dict) else state[0]
        dtype = kind.dotted.removeprefix("torch.") if isinstance(kind, Name) else str(kind)
        if not is_dtype(dtype):
            raise self._fail(f"is of the dtype {dtype}, which is not known here", name)
        pieces = []
        for chunk in fields["chunks"]:
            parts = _made(chunk, "ChunkStorageMetadata").fields
            pieces.append(Piece(_sizes(parts["offsets"]), _sizes(parts["sizes"]), "", 0, 0))
        return Saved(shape, dtype, path, pieces)

    def _placed(self, name: str, piece: Piece, places: dict[tuple[str, Any], dict[str, Any]]) -> Piece:
        found = places.get((name, piece.offsets))
        if found is None:
            raise self._fail(f"its piece at {piece.offsets} is in no file", name)
        file, start, length = found["relative_path"], found["offset"], found["length"]
        if not is_plain_name(file):
            raise self._fail(f"its piece is in {str(file)[:200]!r}, which is not a plain file name", name)
        if found.get("transform_descriptors"):
            raise self._fail(f"is stored through {found['transform_descriptors']}, which is not read here", name)
        if any(type(number) is not int or number < 0 for number in (start, length)):
            raise self._fail(f"its piece stands at {start!r} and takes {length!r} bytes", name)
        return Piece(piece.offsets, piece.sizes, file, start, length)


def check_whole(saved: Saved, name: str, file: Path) -> None:
    """`CheckpointError` unless the pieces lie in the tensor, apart, and fill it."""
    for piece in saved.pieces:
        inside = len(piece.offsets) == len(piece.sizes) == len(saved.shape) and all(
            offset + size <= whole for offset, size, whole in zip(piece.offsets, piece.sizes, saved.shape, strict=True)
        )
        if not inside:
            message = f"its piece of {piece.sizes} at {piece.offsets} does not lie in its shape {saved.shape}"
            raise CheckpointError(f"{message}; {_AGAIN}", file=file, tensor=name)
    present, needed = sum(math.prod(piece.sizes) for piece in saved.pieces), math.prod(saved.shape)
    if present != needed or _overlap(saved.pieces):
        message = f"its {len(saved.pieces)} pieces hold {present} elements and its shape {saved.shape} needs {needed}"
        raise CheckpointError(f"{message}, each once; a rank's file is missing, or {_AGAIN}", file=file, tensor=name)


def _overlap(pieces: list[Piece]) -> bool:
    """Whether some element is in two pieces."""
    filled = [piece for piece in pieces if math.prod(piece.sizes)]
    axes = range(len(filled[0].offsets)) if filled else range(0)
    # Most pieces are cut along one dimension: sorted by that one, neighbours tell.
    axis = max(axes, key=lambda axis: len({piece.offsets[axis] for piece in filled}), default=None)
    if axis is None:
        return len(filled) > 1
    ordered = sorted(filled, key=lambda piece: piece.offsets[axis])
    for number, one in enumerate(ordered):
        for other in ordered[number + 1 :]:
            if other.offsets[axis] >= one.offsets[axis] + one.sizes[axis]:
                break
            spans = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
            if all(a < b + n and b < a + m for a, m, b, n in spans):
                return True
    return False


def _made(value: Any, name: str) -> Made:
    if not isinstance(value, Made) or value.name.rpartition(".")[2] != name:
        raise ValueError(f"a {name} expected")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    """A `torch.Size`, or the tuple it was made from."""
    parts = value.arguments[0] if isinstance(value, Made) and value.name == "torch.Size" else value
    if not isinstance(parts, tuple | list) or len(parts) > MAX_RANK:
        raise ValueError("sizes expected")
    if any(type(size) is not int or not 0 <= size < 2**63 for size in parts):
        raise ValueError(f"{parts!r} as sizes")
    return tuple(parts)


def _path(value: Any, name: str) -> tuple[str, ...]:
    keys = value if isinstance(value, tuple) and value else (name,)
    return tuple(str(key) if isinstance(key, str | int) else "" for key in keys)
