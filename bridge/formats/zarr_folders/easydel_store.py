"""EasyDeL's checkpoint folder: `tensorstore_index.json` and a zarr folder for every array.

Source: eformer 0.0.101, `serialization/serialization.py` (`tree_serialize_leaves`), and EasyDeL 0.3.0,
`infra/mixins/bridge.py` (`save_pretrained` writes the parameters under the prefix "model", the optimizer under "tx").
The index lists every array's path, shape and dtype by prefix; the keys of the tree are the folders of the path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from easytorch.bridge.core.context_manager import ContextManager
from easytorch.bridge.core.json_files import read_json
from easytorch.bridge.core.reader import Reader
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.base import Layout, Source
from easytorch.bridge.formats.zarr_folders.arrays import ZarrFolders, check_names, write_folder

INDEX = "tensorstore_index.json"
_INDEX_LIMIT = 256 << 20
_PREFIX = "model"
# The folder of a training step, as eformer's `Checkpointer` calls it.
_STEP = re.compile(r"run-(\d{1,18})")


class EasydelReader(ContextManager):
    """One open checkpoint: the arrays of the prefix "model", or of the only one there is."""

    def __init__(self, index: Path) -> None:
        content = read_json(index, limit=_INDEX_LIMIT)
        if content.get("format") != "tensorstore":
            raise CheckpointError(
                f"has the format {content.get('format')!r}, and 'tensorstore' is read here", file=index
            )
        prefix, entries, others = _chosen(content, index)
        folders, stated = {}, {}
        for entry in entries:
            path = entry.get("path") if isinstance(entry, dict) else None
            if not isinstance(path, str):
                raise CheckpointError(f"lists {entry!r}, which has no path; save the checkpoint again", file=index)
            name = path.removeprefix(f"{prefix}/")
            if name in folders:
                raise CheckpointError("stands in the index twice; save the checkpoint again", file=index, tensor=name)
            folders[name], stated[name] = path, entry
        self._arrays = ZarrFolders(index.parent, folders, index)
        self.tensors: Mapping[str, TensorInfo] = self._arrays.tensors
        for name, info in self.tensors.items():
            if (stated[name].get("shape"), stated[name].get("dtype")) != (list(info.shape), info.dtype):
                raise CheckpointError(
                    f"is {info.dtype} {info.shape}, the index says {stated[name].get('dtype')} "
                    f"{stated[name].get('shape')}; copy the checkpoint again",
                    file=index,
                    tensor=name,
                )
        self.metadata: Mapping[str, str] = {"not read": ", ".join(others)} if others else {}
        beside = ("checkpoint_metadata.json", "metadata.json", *(f"{one}_structure.json" for one in (prefix, *others)))
        own = (*beside, *others, *dict.fromkeys(path.partition("/")[0] for path in folders.values()))
        self.files = (index, *(file for name in own if (file := index.parent / name).exists()))

    def read(self, name: str) -> np.ndarray:
        """A copy of the data of one tensor."""
        return self._arrays.read(name)

    def close(self) -> None:
        """Nothing: files are opened as they are read."""


def _chosen(content: dict[str, Any], index: Path) -> tuple[str, list[Any], list[str]]:
    """The prefix that is read, its entries, and the prefixes that are left."""
    prefixes = content.get("prefixes") or {}
    if not isinstance(prefixes, dict):
        raise CheckpointError("its `prefixes` are no table; save the checkpoint again", file=index)
    chosen = _PREFIX if _PREFIX in prefixes else next(iter(prefixes)) if len(prefixes) == 1 else ""
    entries = prefixes.get(chosen, content.get("arrays"))
    if not isinstance(entries, list) or not entries:
        there = f"it has {', '.join(prefixes)}" if prefixes else "it has none"
        raise CheckpointError(f"lists no arrays of a model ({there}); give the checkpoint of a model", file=index)
    return chosen, entries, [prefix for prefix in prefixes if prefix != chosen]


class EasydelStore:
    """The format EasyDeL saves models in."""

    name = "EasyDeL"
    scheme = None
    usual_scheme = "easydel"
    suffix: str | None = None

    def detect(self, path: Path) -> Path | None:
        """The index of a folder, or that of its last training step."""
        if path.is_file():
            return path if path.name == INDEX else None
        if (path / INDEX).is_file():
            return path / INDEX
        steps = {int(found[1]): one for one in path.glob("run-*") if (found := _STEP.fullmatch(one.name))}
        whole = [step for step in steps if (steps[step] / INDEX).is_file()]
        return steps[max(whole)] / INDEX if whole else None

    def open(self, file: Path, *, writable: bool = False) -> Reader:
        """The checkpoint behind an index; what is read always belongs to its reader."""
        return EasydelReader(file)

    def layout(self, tensors: Sequence[TensorInfo], max_shard_size: int) -> Layout:
        """One folder per tensor."""
        check_names(list(tensors), self.name)
        return {f"{_PREFIX}/{info.name}": [info] for info in tensors}

    def write(self, folder: Path, file: str, tensors: Sequence[TensorInfo], source: Source) -> None:
        for info in tensors:
            write_folder(folder / file, info, source.read(info.name))
            source.wrote(info)

    def finish(self, folder: Path, layout: Layout, source: Source) -> None:
        """The index, and the metadata eformer looks for."""
        entries = [{"path": file, "shape": list(info.shape), "dtype": info.dtype} for file, (info,) in layout.items()]
        index = {"format": "tensorstore", "version": "easytorch", "prefixes": {_PREFIX: entries}}
        metadata = {"version": "easytorch", "custom_metadata": {"step": 0}}
        for name, content in ((INDEX, index), ("checkpoint_metadata.json", metadata)):
            (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def reads_back(self, info: TensorInfo, array: np.ndarray) -> np.ndarray:
        return array
