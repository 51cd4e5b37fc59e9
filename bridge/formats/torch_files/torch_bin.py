"""Pickled torch checkpoints, read only: `pytorch_model.bin` (single or sharded), any `.bin`, `.pt` or `.pth` by path.

Of a training state (`{"model": ..., "optimizer": ...}`) the model is read and the rest reported.
They are unpickled with `weights_only=True`, which runs no code from the file, or not at all.
"""

from __future__ import annotations

import pickle
import struct
import tarfile
import warnings
import zipfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from easytorch.bridge.core.context_manager import ContextManager
from easytorch.bridge.core.in_parts import InParts
from easytorch.bridge.core.mapped import ReadFile, Unread
from easytorch.bridge.core.reader import Reader
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.dtypes import is_dtype, numpy_dtype, to_numpy
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.sharding import find, open_files
from easytorch.bridge.formats.torch_files.pickle_check import check_pickle
from easytorch.bridge.formats.torch_files.training_state import model_in, own_names

if TYPE_CHECKING:
    import torch

# What torch's and Python's readers raise for damaged archives and pickles.
_DAMAGED = (
    *(OSError, EOFError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError),
    *(ArithmeticError, MemoryError, struct.error, tarfile.TarError, zipfile.BadZipFile),
)

# A tensor that repeats a few values (`expand`) may be larger than its file: masks and position ids are.
_REPEATED_LIMIT = 64 << 20


class PickleFile(ContextManager):
    """One open pickle. Data stays in the file where torch wrote a zip archive, as it does since 1.6.

    `writable` tensors are a private map of it.
    """

    def __init__(self, path: Path, writable: bool = False) -> None:
        self.files = (path,)
        self._file = ReadFile(path)
        self._mapped = writable
        self.metadata: Mapping[str, str] = {}
        self._state, self.left_out = self._load(path)
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(name, tuple(tensor.shape), self._dtype(name, tensor), str(path))
            for name, tensor in self._state.items()
        }

    def _load(self, path: Path) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
        """The model's tensors by name, and the keys of what a training state holds beside them."""
        import torch

        try:
            zipped = zipfile.is_zipfile(path)
            if not zipped and _begins_as_zip_or_is_empty(path):
                raise CheckpointError("is truncated; download or save it again", file=path)
            check_pickle(path)
            with warnings.catch_warnings():
                # torch warns of a pickle protocol it may not know; what it does not know it refuses.
                warnings.simplefilter("ignore", UserWarning)
                # On meta, torch reads no data and says where each storage stands, in whatever order its bytes are.
                here = not zipped or self._mapped or _big_endian(path)
                state = torch.load(
                    path, map_location="cpu" if here else "meta", weights_only=True, mmap=zipped and here
                )
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                "is not a pickle of plain tensors, and others are not loaded because they can run code; "
                "save the state dict as safetensors",
                file=path,
            ) from error
        except CheckpointError:
            raise
        except _DAMAGED as error:
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise CheckpointError(f"cannot be read ({reason}); download or save it again", file=path) from error
        left_out: tuple[str, ...] = ()
        if isinstance(state, dict):
            state, left_out = model_in(state, path)
        if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
            raise CheckpointError(f"holds a {type(state).__name__}, not a state dict of tensors by name", file=path)
        size = path.stat().st_size
        for name, value in state.items():
            if not isinstance(value, torch.Tensor):
                message = f"is a {type(value).__name__}, not a tensor; save the model's state dict alone"
                raise CheckpointError(message, file=path, tensor=name)
            if value.nbytes > max(size, _REPEATED_LIMIT):
                message = f"takes {value.nbytes} bytes, the whole file has {size}: it is one value repeated; remove it"
                raise CheckpointError(message, file=path, tensor=name)
            if value.is_meta and _end(value) > size:
                message = f"is truncated: the data of this tensor ends at byte {_end(value)} of {size}"
                raise CheckpointError(f"{message}; download or save it again", file=path, tensor=name)
        return {own: state[name] for own, name in own_names(state, path).items()}, left_out

    def _dtype(self, name: str, tensor: torch.Tensor) -> str:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if not is_dtype(dtype) or str(tensor.layout) != "torch.strided":
            raise CheckpointError(f"is {dtype} with layout {tensor.layout}", file=self.files[0], tensor=name)
        return dtype

    def read(self, name: str) -> np.ndarray:
        """The elements, with the tensor's own strides; its own memory where the file is mapped."""
        return self.read_in_parts(name).whole()

    def read_in_parts(self, name: str) -> InParts:
        """The same, not read yet where they stand in the file one after the other."""
        tensor, info = self._state[name], self.tensors[name]
        if not tensor.is_meta:
            return InParts.of(to_numpy(tensor))
        dtype = numpy_dtype(info.dtype)
        start = _start(tensor) + int(tensor.storage_offset()) * dtype.itemsize
        if tensor.is_contiguous() or 0 in info.shape:
            return InParts.of(Unread(self._file, start, info.shape, dtype))
        strides = tuple(stride * dtype.itemsize for stride in tensor.stride())
        return InParts.of(self._file.strided(start, info.shape, dtype, strides))

    def close(self) -> None:
        """Lets go of the tensors, and with them of a mapped file."""
        self._state = {}


def _start(tensor: torch.Tensor) -> int:
    """The byte of the archive where the storage of a tensor that was loaded on meta begins."""
    start = tensor.untyped_storage()._checkpoint_offset
    assert start is not None, "torch says it of every storage that it loads on meta"
    return start


def _end(tensor: torch.Tensor) -> int:
    return _start(tensor) + tensor.untyped_storage().nbytes()


def _big_endian(archive: Path) -> bool:
    with zipfile.ZipFile(archive) as opened:
        return any(name.endswith("/byteorder") and opened.read(name) == b"big" for name in opened.namelist())


def _begins_as_zip_or_is_empty(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(4) in (b"PK\x03\x04", b"")


class TorchBin:
    """The format in which transformers saved torch models before safetensors."""

    name = "torch pickle"
    scheme = "torch"

    def detect(self, path: Path) -> Path | None:
        """`pytorch_model.bin.index.json`, else `pytorch_model.bin`, in a folder; files by their ending."""
        return find(path, "pytorch_model.bin", suffixes=(".bin", ".bin.index.json", ".pt", ".pth", ".ckpt"))

    def open(self, file: Path, *, writable: bool = False) -> Reader:
        """The checkpoint behind an index or a single file."""
        return open_files(file, partial(PickleFile, writable=writable))
