"""torch.distributed.checkpoint: a folder of `.metadata` and `__0_0.distcp`, `__1_0.distcp`, ..., at least one per rank.

Tensors sharded over ranks (FSDP, DTensor) are assembled from their pieces. Of a training state only the model is
read: the state of optimizers, schedulers and loops is left out, and reported. The per-rank safetensors shards of
`HuggingFaceStorageWriter` are read too; its consolidated ones are ordinary safetensors.
Source: torch.distributed.checkpoint of torch 2.13: filesystem.py, hf_storage.py, default_planner.py.
"""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from easytorch.bridge.core.context_manager import ContextManager
from easytorch.bridge.core.mapped import MappedFile, check_announced
from easytorch.bridge.core.reader import Reader
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.dtypes import numpy_dtype, to_torch, torch_stores
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.base import Layout, Source
from easytorch.bridge.formats.safetensors_files.torch_safetensors import SafetensorsFile
from easytorch.bridge.formats.sharding import split
from easytorch.bridge.formats.torch_files.dcp_metadata import Piece, Saved, check_whole, read_metadata
from easytorch.bridge.formats.torch_files.saved_tensor import Stretch, read_saved
from easytorch.bridge.formats.torch_files.training_state import WRAPPERS, own_names, training_path

_METADATA = ".metadata"
# As `hf_storage._gen_file_name` calls a rank's file.
_SHARD = "shard-*-model-*-of-*.safetensors"
_SHARDING_INFO = "DCP_SHARDING_INFO"
ReadPiece = Callable[[Piece, str], np.ndarray]


class DcpReader(ContextManager):
    """The model in an open checkpoint."""

    def __init__(
        self, files: Sequence[Path], saved: Mapping[str, Saved], others: Sequence[Sequence[str]], read: ReadPiece
    ) -> None:
        self.files = tuple(files)
        self._read = read
        names, left_out = _model(saved, files[0])
        self.left_out = (*left_out, *(training_path(path) or "/".join(path) for path in others))
        self._saved = {name: saved[given] for name, given in names.items()}
        self.metadata: Mapping[str, str] = {}
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(name, one.shape, one.dtype, str(files[0])) for name, one in self._saved.items()
        }

    def read(self, name: str) -> np.ndarray:
        """The assembled tensor; where one piece is all of it, a view of the mapped file."""
        saved = self._saved[name]
        if len(saved.pieces) == 1:
            # An empty piece may have other sizes than the tensor.
            return self._piece(name, saved, saved.pieces[0]).reshape(saved.shape)
        whole = np.empty(saved.shape, numpy_dtype(saved.dtype))
        for piece in saved.pieces:
            spans = zip(piece.offsets, piece.sizes, strict=True)
            whole[tuple(slice(start, start + size) for start, size in spans)] = self._piece(name, saved, piece)
        return whole

    def _piece(self, name: str, saved: Saved, piece: Piece) -> np.ndarray:
        array = self._read(piece, name)
        if array.shape != piece.sizes or array.dtype != numpy_dtype(saved.dtype):
            message = f"its piece is {array.dtype.name} {array.shape}, not {saved.dtype} {piece.sizes}"
            raise CheckpointError(f"{message}; save the checkpoint again", file=piece.file, tensor=name)
        return array

    def close(self) -> None:
        """Lets go of the mapped files."""
        self._read = _closed


def _closed(piece: Piece, name: str) -> np.ndarray:
    raise ValueError("the checkpoint is closed")


def _model(saved: Mapping[str, Saved], file: Path) -> tuple[dict[str, str], list[str]]:
    """The model's tensors by their own names -> their names in the checkpoint, and what is left out."""
    found: dict[str, str] = {}
    left_out: list[str] = []
    for given, one in saved.items():
        if (rest := training_path(one.path)) is not None:
            left_out.append(rest)
            continue
        *outer, own = one.path
        name = ".".join([*(key for key in outer if key not in WRAPPERS), own])
        if name in found:
            message = f"and {found[name]!r} are both called {name!r}; save one model"
            raise CheckpointError(message, file=file, tensor=given)
        found[name] = given
    return {own: found[name] for own, name in own_names(found, file).items()}, left_out


class _Files:
    """The `.distcp` files of a folder, mapped when they are first needed."""

    def __init__(self, folder: Path, saved: Mapping[str, Saved], writable: bool) -> None:
        self._maps: dict[str, MappedFile] = {}
        for name, one in saved.items():
            for piece in one.pieces:
                if piece.file not in self._maps:
                    if not (folder / piece.file).is_file():
                        message = f"the file {piece.file!r} is missing; copy every rank's files"
                        raise CheckpointError(message, file=folder, tensor=name)
                    self._maps[piece.file] = MappedFile(folder / piece.file, writable)
                size = self._maps[piece.file].size
                if piece.start + piece.length > size:
                    message = f"is truncated: bytes {piece.start} to {piece.start + piece.length} wanted of {size}"
                    raise CheckpointError(f"{message}; copy it again", file=folder / piece.file, tensor=name)
                if np.prod(piece.sizes, dtype=object) * numpy_dtype(one.dtype).itemsize > piece.length:
                    message = f"a piece of {piece.sizes} is said to take {piece.length} bytes"
                    raise CheckpointError(f"{message}; save the checkpoint again", file=folder, tensor=name)
        self.paths = [folder / file for file in self._maps]

    def read(self, piece: Piece, name: str) -> np.ndarray:
        return read_saved(self._maps[piece.file], piece.start, piece.start + piece.length, name)


class _Shards:
    """The safetensors that ranks wrote, with the offsets of their pieces in the full tensors."""

    def __init__(self, files: Sequence[Path], writable: bool) -> None:
        self._files: dict[str, SafetensorsFile] = {}
        self.saved: dict[str, Saved] = {}
        for file in files:
            shard = self._files[file.name] = SafetensorsFile(file, writable)
            offsets = _saved_offsets(shard, file)
            for name, info in shard.tensors.items():
                start = offsets.get(name, (0,) * len(info.shape))
                if len(start) != len(info.shape):
                    raise CheckpointError("its saved offsets are not of its shape", file=file, tensor=name)
                one = self.saved.setdefault(name, Saved((0,) * len(info.shape), info.dtype, (name,)))
                if len(one.shape) != len(info.shape) or one.dtype != info.dtype:
                    raise CheckpointError("is of another kind than in the shards before", file=file, tensor=name)
                ends = (begin + size for begin, size in zip(start, info.shape, strict=True))
                one.shape = tuple(max(end, so_far) for end, so_far in zip(ends, one.shape, strict=True))
                one.pieces.append(Piece(start, info.shape, file.name, 0, info.nbytes))
        for name, one in self.saved.items():
            check_whole(one, name, files[0])

    def read(self, piece: Piece, name: str) -> np.ndarray:
        return self._files[piece.file].read(name)


def _saved_offsets(shard: SafetensorsFile, file: Path) -> dict[str, tuple[int, ...]]:
    try:
        content = json.loads(shard.metadata.get(_SHARDING_INFO, "{}"))
        found = {name: tuple(entry["saved_offsets"]) for name, entry in content.items()}
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"its {_SHARDING_INFO} is not one ({error!r}); save it again", file=file) from error
    for name, offsets in found.items():
        if any(type(offset) is not int or not 0 <= offset < 2**63 for offset in offsets):
            raise CheckpointError(f"its saved offsets are {offsets!r}", file=file, tensor=name)
    return found


class TorchDcp:
    """The format. What is written holds the model alone, by its own names, as `model.state_dict()` would."""

    name = "torch DCP"
    scheme = "torch"
    suffix: str | None = None

    def detect(self, path: Path) -> Path | None:
        """The folder's `.metadata`, also for a `.distcp` file in it; the folder where ranks wrote safetensors."""
        folder = path.parent if path.name == _METADATA or path.suffix == ".distcp" else path
        if (folder / _METADATA).is_file():
            return folder / _METADATA
        return folder if folder.is_dir() and next(folder.glob(_SHARD), None) is not None else None

    def open(self, file: Path, *, writable: bool = False) -> Reader:
        """The model in the folder."""
        if file.is_dir():
            paths = sorted(file.glob(_SHARD))
            shards = _Shards(paths, writable)
            return DcpReader(paths, shards.saved, (), shards.read)
        saved, others = read_metadata(file)
        files = _Files(file.parent, saved, writable)
        return DcpReader([file, *files.paths], saved, others, files.read)

    def layout(self, tensors: Sequence[TensorInfo], max_shard_size: int) -> Layout:
        """The files of one rank, as its writer calls them."""
        for info in tensors:
            if not torch_stores(info.dtype):
                raise CheckpointError(f"torch has no dtype {info.dtype}; cast it to one it has", tensor=info.name)
        return {f"__0_{number}.distcp": group for number, group in enumerate(split(tensors, max_shard_size))}

    def write(self, folder: Path, file: str, tensors: Sequence[TensorInfo], source: Source) -> None:
        """One file: every tensor as `torch.save` writes it, one after the other."""
        import torch

        with (folder / file).open("wb") as stream:
            for info in tensors:
                array = source.read(info.name)
                check_announced(info, array)
                torch.save(to_torch(array), stream)
                source.wrote(info)

    def finish(self, folder: Path, layout: Layout, source: Source) -> None:
        """`.metadata`, with where each tensor stands."""
        import torch
        from torch.distributed.checkpoint import filesystem, metadata

        described: dict[str, metadata.TensorStorageMetadata | metadata.BytesStorageMetadata] = {}
        places = {}
        for file, infos in layout.items():
            for info, (start, length) in zip(infos, _stretches(folder / file, len(infos)), strict=True):
                origin = torch.Size((0,) * len(info.shape))
                chunk = metadata.ChunkStorageMetadata(origin, torch.Size(info.shape))
                kind = metadata.TensorProperties(getattr(torch, info.dtype))
                described[info.name] = metadata.TensorStorageMetadata(kind, torch.Size(info.shape), [chunk])
                places[metadata.MetadataIndex(info.name, origin, 0)] = filesystem._StorageInfo(file, start, length)
        paths = {name: (name,) for name in described}
        content = metadata.Metadata(described, paths, places, metadata.StorageMeta(), filesystem.CURRENT_DCP_VERSION)
        with (folder / _METADATA).open("wb") as stream:
            pickle.dump(content, stream)

    def reads_back(self, info: TensorInfo, array: np.ndarray) -> np.ndarray:
        return array


def _stretches(file: Path, count: int) -> list[tuple[int, int]]:
    """(start, length) of the `count` saved tensors that fill `file`; an archive's size is known only from its end."""
    mapped = MappedFile(file)
    found: list[tuple[int, int]] = []
    end = mapped.size
    for _ in range(count):
        with zipfile.ZipFile(Stretch(mapped, 0, end)) as archive:
            start = min(entry.header_offset for entry in archive.infolist())
        found.append((start, end - start))
        end = start
    mapped.close()
    return found[::-1]
