"""Checkpoints and weights in memory: Flax trees and torch state dicts, from files and from each other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from easytorch.bridge.atomic import new_folder
from easytorch.bridge.dtypes import to_numpy, to_torch
from easytorch.bridge.families import read_config, rules_for
from easytorch.bridge.formats import registry
from easytorch.bridge.formats.base import TensorInfo
from easytorch.bridge.plan import Step, plan_to_flax, plan_to_torch
from easytorch.bridge.rules import Rules, compile_rules
from easytorch.bridge.side import read_side_file
from easytorch.bridge.sizes import parse_size
from easytorch.bridge.trees import flat, nested

if TYPE_CHECKING:
    import torch

Tree = dict[str, Any]


def load_tree(path: str | PathLike[str], rules: Rules | None = None) -> Tree:
    """The weights at `path`, a folder or a file in any format, as a nested dict of numpy arrays in Flax naming.

    Arrays are read-only views of the mapped file where the layouts allow. A torch checkpoint goes through `rules`, by
    default those of the family its config.json names.
    """
    form, reader = registry.open_checkpoint(Path(path), prefer="flax")
    with reader:
        leaves = {name: reader.read(name) for name in reader.tensors}
        if form.naming == "flax":
            return nested(leaves)
        config = read_config(Path(path))
        return _tree(leaves, rules or rules_for(config.model_type), tie=bool(config.content.get("tie_word_embeddings")))


def save_tree(
    tree: Mapping[str, Any],
    dst: str | PathLike[str],
    *,
    config: Mapping[str, Any] | None = None,
    max_shard_size: str | int = "5GB",
) -> None:
    """Writes a nested dict of numpy or jax arrays as a new Flax msgpack folder, with `config` as its config.json."""
    leaves = {path: np.asarray(leaf) for path, leaf in flat(tree).items()}
    form = registry.target("flax")
    layout = form.layout(list(_infos(leaves).values()), parse_size(max_shard_size))
    with new_folder(Path(dst)) as folder:
        form.write(folder, layout, (leaves[info.name] for infos in layout.values() for info in infos))
        if config is not None:
            (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")


def load_torch_state_dict(
    path: str | PathLike[str], rules: Rules | None = None, *, tie_word_embeddings: bool = True
) -> dict[str, torch.Tensor]:
    """The weights at `path`, a folder or a file in any format, as torch tensors by their torch names.

    Flax weights go through `rules`, by default those of the family its config.json names; torch tensors kept beside
    them are merged back. Tensors are their own memory, so a model may keep and change them.
    """
    form, reader = registry.open_checkpoint(Path(path), prefer="flax")
    with reader:
        if form.naming == "torch":
            return {name: to_torch(reader.read(name)) for name in reader.tensors}
        rules = rules or rules_for(read_config(Path(path)).model_type)
        side, tied = read_side_file(reader.files[0].parent)
        kept = {} if side is None else {name: to_torch(side.read(name)) for name in side.tensors}

        def same(one: Step, other: Step) -> bool:
            return _same(one, other, reader.read)

        plan = plan_to_torch(
            reader.tensors, compile_rules(rules), tie=tie_word_embeddings, same=same, kept=kept, tied=tied
        )
        state = {}
        for step in plan.steps:
            arrays = step.run([reader.read(name) for name in step.sources])
            state.update((info.name, to_torch(array)) for info, array in zip(step.targets, arrays, strict=True))
        return state | kept
