"""`save_tree`: a tree of arrays as a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from easytorch.bridge.core.callable_module import call_as
from easytorch.bridge.core.config import Config
from easytorch.bridge.core.sizes import parse_size
from easytorch.bridge.jobs import targets
from easytorch.bridge.jobs.sources import ReaderSource
from easytorch.bridge.memory.tree import MemoryTree
from easytorch.bridge.storage.atomic import new_folder


def save_tree(
    tree: Any,
    dst: str | PathLike[str],
    *,
    to: str = "flax",
    config: Mapping[str, Any] | None = None,
    max_shard_size: str | int = "5GB",
) -> None:
    """Writes a tree of arrays (`bridge.memory.tree`) as the new folder `dst` in the format `to`, names as they are.

    `config` becomes its config.json.
    """
    leaves = MemoryTree(tree, as_stored=True)
    format_ = targets.target(to).format
    layout = format_.layout(list(leaves.tensors.values()), parse_size(max_shard_size))
    source = ReaderSource(leaves, None if config is None else Config(Path(dst) / "config.json", dict(config)))
    with new_folder(Path(dst)) as folder:
        for file, infos in layout.items():
            format_.write(folder, file, infos, source)
        format_.finish(folder, layout, source)
        if config is not None:
            (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")


call_as(save_tree)
