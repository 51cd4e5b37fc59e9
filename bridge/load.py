"""Weights in memory: Flax trees and torch state dicts, from checkpoints and from each other."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from easytorch.bridge.architecture import architecture_of
from easytorch.bridge.atomic import new_folder
from easytorch.bridge.bits import identical
from easytorch.bridge.dtypes import numpy_dtype, to_numpy, to_torch
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.families import read_config, rules_for
from easytorch.bridge.formats import registry
from easytorch.bridge.formats.base import TensorInfo
from easytorch.bridge.plan import Plan, Same, Step, plan_to_flax, plan_to_torch
from easytorch.bridge.rules import Rules, compile_rules
from easytorch.bridge.side import read_side_file
from easytorch.bridge.sizes import parse_size
from easytorch.bridge.trees import flat, nested

if TYPE_CHECKING:
    import torch

Tree = dict[str, Any]
Read = Callable[[str], np.ndarray]


def load_tree(path: str | PathLike[str], rules: Rules | None = None) -> Tree:
    """The weights at `path`, a folder or a file in any format, as a nested dict of numpy arrays in Flax naming.

    Arrays are read-only views of the mapped file where the layouts allow. A torch checkpoint goes through `rules`, by
    default those of the family its config.json names.
    """
    path = Path(path)
    form, reader = registry.open_checkpoint(path, prefer="flax")
    with reader:
        if form.naming == "flax":
            return nested({name: reader.read(name) for name in reader.tensors})
        config = read_config(path)
        architecture = architecture_of(config, len(reader.tensors))
        table = compile_rules(rules or rules_for(config.model_type, config.file))
        fill = architecture.shapes if architecture.tie else ()
        plan = plan_to_flax(reader.tensors, table, tie=architecture.tie, same=_same(reader.read), fill=fill)
        return nested(_run(plan, reader.read))


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
    path: str | PathLike[str], rules: Rules | None = None, *, tie_word_embeddings: bool | None = None
) -> dict[str, torch.Tensor]:
    """The weights at `path`, a folder or a file in any format, as torch tensors by their torch names.

    Flax weights go through `rules`, by default those of the family its config.json names; torch tensors kept beside
    them are merged back. A tied repeat (`tie_word_embeddings`, by default what config.json says) is left out.
    The tensors may be changed: untransposed ones are a private map of the file, others their own memory.
    """
    path = Path(path)
    form, reader = registry.open_checkpoint(path, prefer="flax", writable=True)
    with reader:
        if form.naming == "torch":
            return {name: to_torch(reader.read(name)) for name in reader.tensors}
        if rules is None or tie_word_embeddings is None:
            config = read_config(path)
            rules = rules_for(config.model_type, config.file) if rules is None else rules
            if tie_word_embeddings is None:
                tie_word_embeddings = bool(config.content.get("tie_word_embeddings", True))
        side, tied = read_side_file(reader.files[0].parent)
        kept = {}
        if side is not None:
            with side:
                kept = {name: to_torch(side.read(name)) for name in side.tensors}
        plan = plan_to_torch(
            reader.tensors, compile_rules(rules), tie=tie_word_embeddings, same=_never, kept=kept, tied=tied
        )
        return {name: to_torch(array) for name, array in _run(plan, reader.read).items()} | kept


def tree_to_state_dict(
    tree: Mapping[str, Any], rules: Rules, *, tie_word_embeddings: bool = True
) -> dict[str, torch.Tensor]:
    """A nested dict of numpy or jax arrays in Flax naming as torch tensors; untransposed writable ones share memory."""
    leaves = {path: np.asarray(leaf) for path, leaf in flat(tree).items()}
    plan = plan_to_torch(_infos(leaves), compile_rules(rules), tie=tie_word_embeddings, same=_never)
    return {name: to_torch(array) for name, array in _run(plan, leaves.__getitem__).items()}


def state_dict_to_tree(
    state_dict: Mapping[str, torch.Tensor], rules: Rules, *, tie_word_embeddings: bool = True
) -> Tree:
    """torch tensors as a nested dict of numpy arrays in Flax naming, views of the tensors; buffers are left out."""
    arrays = {name: to_numpy(tensor) for name, tensor in state_dict.items()}
    read = arrays.__getitem__
    plan = plan_to_flax(_infos(arrays), compile_rules(rules), tie=tie_word_embeddings, same=_same(read))
    return nested(_run(plan, read))


def _infos(arrays: Mapping[str, np.ndarray]) -> dict[str, TensorInfo]:
    for name, array in arrays.items():
        if numpy_dtype(array.dtype.name) is None:
            raise CheckpointError(f"is of dtype {array.dtype}, not an array of numbers", tensor=name)
    return {name: TensorInfo(name, array.shape, array.dtype.name) for name, array in arrays.items()}


def _run(plan: Plan, read: Read) -> dict[str, np.ndarray]:
    made: dict[str, np.ndarray] = {}
    for step in plan.steps:
        arrays = step.run([read(name) for name in step.sources])
        made.update((info.name, array) for info, array in zip(step.targets, arrays, strict=True))
    return made


def _same(read: Read) -> Same:
    def same(one: Step, other: Step) -> bool:
        first, second = (step.run([read(name) for name in step.sources])[0] for step in (one, other))
        return identical(first, second)

    return same


def _never(one: Step, other: Step) -> bool:
    """A model in memory takes a tied tensor and its repeat alike, so they need not be compared."""
    return False
