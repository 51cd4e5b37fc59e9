"""`load_tree`: the weights of a checkpoint as a tree of arrays."""

from __future__ import annotations

from os import PathLike
from typing import Any

from easytorch.bridge.checkpoint import open_checkpoint
from easytorch.bridge.core.callable_module import call_as
from easytorch.bridge.core.nested import nested
from easytorch.bridge.jobs.locations import local_source
from easytorch.bridge.memory.tree import Framework, Shardings, placing
from easytorch.bridge.schemes.registry import TORCH


def load_tree(
    path: str | PathLike[str],
    *,
    scheme: str | None = None,
    config: str | PathLike[str] | None = None,
    framework: Framework = "numpy",
    shardings: Shardings = None,
) -> dict[str, Any]:
    """The weights at `path` (`bridge.jobs.locations`), in any format, as a nested dict of arrays of `framework`.

    The names are those of `scheme`; without it a tree keeps its own, and a torch checkpoint gets HF Flax's. `config`
    is the config.json of a checkpoint that has none. numpy's arrays are views of a private map of the file where
    layouts allow: changing them never reaches it. jax's are placed by `shardings` (`bridge.memory.tree`); each device
    receives only its part.
    """
    # numpy's arrays are returned, jax's are copies of them.
    kept = framework == "numpy"
    with (
        local_source(path, prefer="tree") as local,
        open_checkpoint(local, prefer="tree", config=config, writable=kept) as checkpoint,
    ):
        wanted = scheme or ("flax" if checkpoint.scheme == TORCH else checkpoint.scheme)
        reader = checkpoint.in_scheme(wanted, strict=False).reader
        place = placing(framework, shardings)
        return nested({name: place(name, reader.read(name)) for name in reader.tensors})


call_as(load_tree)
