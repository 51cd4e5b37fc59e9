"""EasyDeL's safetensors (`easydel-model.parameters`): a tree whose keys are joined by dots; read only.

Source: FJFormer `checkpoint/streamer.py` (`save_checkpoint_safe`) and eformer `serialization/base_manager.py`, what
EasyDeL wrote from 2024 on, in one file or in shards, until it took tensorstore.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from easytorch.bridge.core.reader import Reader
from easytorch.bridge.core.renamed_reader import by_paths
from easytorch.bridge.formats.safetensors_files.torch_safetensors import SafetensorsFile
from easytorch.bridge.formats.sharding import open_files

_FILE = "easydel-model.parameters"
_INDEX = f"{_FILE}.safetensors.index.json"


class EasydelSafetensors:
    """The format of EasyDeL's models from 2024 to 2025."""

    name = "EasyDeL safetensors"
    scheme = None
    usual_scheme = "easydel"

    def detect(self, path: Path) -> Path | None:
        """The index or the file of a folder; either given as a file."""
        if path.is_file():
            return path if path.name in (_FILE, _INDEX) else None
        return next((file for name in (_INDEX, _FILE) if (file := path / name).is_file()), None)

    def open(self, file: Path, *, writable: bool = False) -> Reader:
        """The checkpoint behind an index or a single file."""
        return by_paths(open_files(file, partial(SafetensorsFile, writable=writable)))
