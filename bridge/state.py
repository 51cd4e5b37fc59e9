"""torch state dicts: from checkpoints in any format, and to and from Flax trees in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from easytorch.bridge.checkpoint import open_checkpoint
from easytorch.bridge.core.boxes import read_box, whole_box
from easytorch.bridge.core.compare import identical
from easytorch.bridge.core.config import Config
from easytorch.bridge.core.reader import Reader
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.dtypes import is_dtype, numpy_dtype, to_numpy, to_torch
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.registry import Found
from easytorch.bridge.memory.dtensors import dtensors_of
from easytorch.bridge.memory.tree import Framework, MemoryTree, Shardings, Tree, shaped_like, tensors_of, tree_of
from easytorch.bridge.rules.completeness import refuse_missing
from easytorch.bridge.rules.plan import Same, Step, plan_from_torch, plan_to_torch
from easytorch.bridge.rules.table import Rules, compile_rules
from easytorch.bridge.schemes.registry import TORCH

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

Read = Callable[[str], np.ndarray]


def load_torch_state_dict(
    path: str | PathLike[str], *, config: str | PathLike[str] | Config | None = None, found: Found | None = None
) -> dict[str, torch.Tensor]:
    """The weights at `path`, a folder or a file in any format, as torch tensors by their torch names.

    Where a folder holds several formats, the tree is read. torch tensors kept beside a tree are merged back, tied
    repeats are left out. `config` is the config.json of a checkpoint that has none, or replaces its own.
    found: what the path was classified as, where that is known (`bridge.formats.registry.classify`).
    The tensors are writable: untransposed ones are a private map of the file, others have their own memory.
    """
    with open_checkpoint(Path(path), prefer="tree", found=found, config=config, writable=True) as checkpoint:
        reader = checkpoint.in_scheme(TORCH, strict=False).reader
        return _apart({name: to_torch(reader.read(name)) for name in reader.tensors})


class StoredTensor:
    """A weight of an open checkpoint, of which an index of slices reads a part, as of safetensors' `get_slice`."""

    def __init__(self, reader: Reader, info: TensorInfo) -> None:
        self._reader, self._info = reader, info
        self.dtype = to_torch(np.empty(0, numpy_dtype(info.dtype))).dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self._info.shape

    def get_shape(self) -> list[int]:
        return list(self._info.shape)

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __getitem__(self, index: Any) -> torch.Tensor:
        """The part in memory of its own. index: `...`, a slice, or a tuple of slices of step 1, one a dimension."""
        box = list(whole_box(self.shape))
        if index is not ...:
            for dim, one in enumerate(index if isinstance(index, tuple) else (index,)):
                start, stop, _ = one.indices(self.shape[dim])
                box[dim] = slice(start, max(start, stop))
        return to_torch(np.array(read_box(self._reader, self._info.name, tuple(box)), order="C"))


@contextmanager
def stored_tensors(
    path: str | PathLike[str], *, config: str | PathLike[str] | Config | None = None, found: Found | None = None
) -> Iterator[dict[str, StoredTensor]]:
    """`load_torch_state_dict` of tensors that are read when they are indexed, while the context lasts.

    Of an Orbax checkpoint a part is read from the chunks that it meets, where its layout is a permutation, heads or
    stacked layers; of others, and of computed layouts, from the tensor.
    """
    with open_checkpoint(Path(path), prefer="tree", found=found, config=config) as checkpoint:
        reader = checkpoint.in_scheme(TORCH, strict=False).reader
        yield {name: StoredTensor(reader, info) for name, info in reader.tensors.items()}


def tree_to_state_dict(
    tree: Any, rules: Rules, *, tie_word_embeddings: bool = True, copy: bool | None = None, complete: bool = True
) -> dict[str, torch.Tensor]:
    """A tree of arrays (`bridge.memory.tree`) named as `rules` say, as torch tensors by their torch names, on the CPU.

    complete: a weight that `rules` name and the tree lacks is a `CheckpointError` (`bridge.rules.completeness`).
    """
    leaves = tree if isinstance(tree, MemoryTree) else MemoryTree(tree)
    table = compile_rules(rules)
    plan = plan_to_torch(leaves.tensors, table, tie=tie_word_embeddings, same=same_arrays(leaves.read))
    if complete:
        refuse_missing(plan, table)
    return _apart(tensors_of(plan, leaves, copy=copy))


def tree_to_dtensors(
    tree: Any, rules: Rules, mesh: DeviceMesh, *, tie_word_embeddings: bool = True
) -> dict[str, torch.Tensor]:
    """The same as `DTensor`s on `mesh`, placed as jax has placed the leaves: see `bridge.memory.dtensors`."""
    leaves = tree if isinstance(tree, MemoryTree) else MemoryTree(tree)
    plan = plan_to_torch(leaves.tensors, compile_rules(rules), tie=tie_word_embeddings, same=_never)
    return dtensors_of(plan, leaves, mesh)


def state_dict_to_tree(
    state_dict: Mapping[str, torch.Tensor],
    rules: Rules,
    *,
    tie_word_embeddings: bool = True,
    fill: Collection[str] = (),
    framework: Framework = "numpy",
    shardings: Shardings = None,
    copy: bool | None = None,
    like: Any = None,
    complete: bool = True,
) -> Tree:
    """torch tensors as a tree of arrays named as `rules` say; buffers are left out.

    fill: torch names that torch may leave out as repeats and the tree must have. like: an nnx module or its state, for
    `nnx.update` (`bridge.memory.tree.shaped_like`). complete: as in `tree_to_state_dict`. The others:
    `bridge.memory.tree.tree_of`.
    """
    arrays = {name: to_numpy(tensor) for name, tensor in state_dict.items()}
    read = arrays.__getitem__
    table = compile_rules(rules)
    plan = plan_from_torch(infos_of(arrays), table, tie=tie_word_embeddings, same=same_arrays(read), fill=fill)
    if complete:
        refuse_missing(plan, table)
    tree = tree_of(plan, read, framework=framework, shardings=shardings, copy=copy)
    return tree if like is None else shaped_like(tree, like)


def infos_of(arrays: Mapping[str, np.ndarray]) -> dict[str, TensorInfo]:
    """The metadata of arrays, for a writer; `CheckpointError` for anything but an array of numbers."""
    for name, array in arrays.items():
        if not is_dtype(array.dtype.name):
            raise CheckpointError(f"is of dtype {array.dtype}, not an array of numbers", tensor=name)
    return {name: TensorInfo(name, array.shape, array.dtype.name) for name, array in arrays.items()}


def _apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, each with its own memory: of two that share it, `save_pretrained` writes only one.

    A leaf under two torch names (an untied BART's embeddings) would be missing there when the model is loaded again.
    """
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.numel() and tensor.data_ptr() in seen:
            tensors[name] = tensor.clone()
        seen.add(tensor.data_ptr())
    return tensors


def same_arrays(read: Read) -> Same:
    """Whether two steps over what `read` gives make bit-identical tensors."""

    def same(one: Step, other: Step) -> bool:
        first, second = (step.run([read(name) for name in step.sources])[0] for step in (one, other))
        return identical(first, second)

    return same


def _never(one: Step, other: Step) -> bool:
    """For models in memory, where a tied tensor and its repeat are not compared: parts may be on other hosts."""
    return False
