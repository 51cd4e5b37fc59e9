"""`inspect`: what a checkpoint holds, without loading tensor data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

from easytorch.bridge.checkpoint import open_checkpoint
from easytorch.bridge.core.callable_module import call_as
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.core.unsupported import note_on_adapter
from easytorch.bridge.formats.steps import step_folder
from easytorch.bridge.jobs.locations import local_source


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint as its files declare it. `architecture` and `model_type` are None without a config.json."""

    path: str
    format: str
    scheme: str
    model_type: str | None
    architecture: str | None
    files: tuple[str, ...]
    metadata: Mapping[str, str]
    tensors: tuple[TensorInfo, ...]
    notes: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(tensor.stored_bytes for tensor in self.tensors)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "path": self.path,
            "format": self.format,
            "scheme": self.scheme,
            "model_type": self.model_type,
            "architecture": self.architecture,
            "files": list(self.files),
            "metadata": dict(self.metadata),
            "total_bytes": self.total_bytes,
            "notes": list(self.notes),
            "tensors": [
                {"name": info.name, "shape": list(info.shape), "dtype": info.dtype, "bytes": info.stored_bytes}
                | ({"packed": info.packed} if info.packed else {})
                for info in self.tensors
            ],
        }


def inspect(path: str | PathLike[str]) -> CheckpointInfo:
    """Format, naming scheme, architecture and tensors of the checkpoint at `path` (`bridge.jobs.locations`).

    Only headers are read; of remote safetensors only those are fetched. `CheckpointError` for an incomplete checkpoint.
    """
    with local_source(path, headers_only=True) as local, open_checkpoint(local) as checkpoint:
        reader, config = checkpoint.reader, checkpoint.config
        return CheckpointInfo(
            path=str(path),
            format=checkpoint.format.name,
            scheme=checkpoint.scheme,
            model_type=None if config is None else config.content.get("model_type"),
            architecture=None if config is None else config.architecture,
            files=tuple(file.name for file in reader.files),
            metadata=dict(reader.metadata),
            tensors=tuple(reader.tensors.values()),
            notes=tuple(note_on_adapter(local, step_folder(local, reader.files[0]))),
        )


call_as(inspect)
