"""`inspect`: what a checkpoint holds, without loading tensor data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from easytorch.bridge.families import read_config
from easytorch.bridge.formats import registry
from easytorch.bridge.formats.base import TensorInfo


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint as its files declare it. `architecture` and `model_type` are None without a config.json."""

    path: str
    format: str
    naming: str
    model_type: str | None
    architecture: str | None
    files: tuple[str, ...]
    metadata: Mapping[str, str]
    tensors: tuple[TensorInfo, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "path": self.path,
            "format": self.format,
            "naming": self.naming,
            "model_type": self.model_type,
            "architecture": self.architecture,
            "files": list(self.files),
            "metadata": dict(self.metadata),
            "total_bytes": self.total_bytes,
            "tensors": [
                {"name": info.name, "shape": list(info.shape), "dtype": info.dtype, "bytes": info.nbytes}
                for info in self.tensors
            ],
        }


def inspect(path: str | PathLike[str]) -> CheckpointInfo:
    """Format, architecture and tensors of the checkpoint at `path`, a folder or a weight file.

    Only headers are read. `CheckpointError` for anything that is not a whole checkpoint.
    """
    path = Path(path)
    form, reader = registry.open_checkpoint(path)
    with reader:
        model_type, architecture = _family(path)
        return CheckpointInfo(
            path=str(path),
            format=form.name,
            naming=form.naming,
            model_type=model_type,
            architecture=architecture,
            files=tuple(file.name for file in reader.files),
            metadata=dict(reader.metadata),
            tensors=tuple(reader.tensors.values()),
        )


def _family(path: Path) -> tuple[str | None, str | None]:
    folder = path if path.is_dir() else path.parent
    if not (folder / "config.json").is_file():
        return None, None
    config = read_config(folder)
    return config.content.get("model_type"), config.architecture
