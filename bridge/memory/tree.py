"""Trees of arrays in memory: the trees of `flax.linen` and `flax.nnx` as torch tensors, and the reverse.

A tree is any nesting whose leaves are arrays of jax, numpy or torch: a dict, a `FrozenDict`, `{"params": ...}` with or
without `batch_stats`, an `nnx.State`, an `nnx.Module`, a pure dict whose leaves are under `value`, or a training state
that holds one of them: a `TrainState` of flax or of your own (a dataclass or a named tuple), an
`nnx.ModelAndOptimizer`. Flax is not imported: its objects are recognized by their attributes.

Sharing memory, `copy`: None shares with numpy arrays and never with jax's, which are immutable; True shares nothing;
False shares wherever the layouts allow, a transposed weight being a strided view of the leaf. Then writing to one (an
optimizer's step, for example) changes the other, and programs compiled by jax may or may not see it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from easytorch.bridge.core.context_manager import ContextManager
from easytorch.bridge.core.nested import flat, nested
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.core.threads import Threads
from easytorch.bridge.dtypes import is_dtype, torch_stores
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.memory.jax_arrays import (
    copied,
    empty,
    fill,
    from_numpy,
    host,
    is_jax,
    is_sharded,
    share,
    to_jax,
    whole,
)
from easytorch.bridge.names.unwrap import Unwrapped, unwrapped
from easytorch.bridge.rules.plan import Plan, Step

if TYPE_CHECKING:
    import torch

Tree = dict[str, Any]
Framework = Literal["numpy", "jax"]
# A jax.sharding.Sharding for all leaves, a tree of them, or what gives one for a leaf's path ("a/b/kernel"), or None.
Shardings = Any

# What `nnx.state` accepts: modules, and optimizers that hold one.
_NNX_NODES = ("flax.nnx.module.Module", "flax.nnx.pytreelib.Pytree", "flax.nnx.object.Object")

# Copies are bound by memory bandwidth, which a few threads saturate.
_THREADS = 4


class MemoryTree(ContextManager):
    """A tree as an open checkpoint: its leaves by path, wrappers taken off as from a file (`bridge.names.unwrap`).

    as_stored: keep the wrappers. params_key: which tree of a training state to read.
    """

    metadata: Mapping[str, str]
    files: tuple[Path, ...]

    def __init__(self, tree: Any, *, as_stored: bool = False, params_key: str | None = None) -> None:
        given = _boxed_leaves(tree)
        found = Unwrapped({path: path for path in given}, (), "") if as_stored else unwrapped(given, params_key)
        self.left_out: tuple[str, ...] = found.left_out
        self.leaves = _by_collection({path: given[name] for path, name in found.names.items()})
        self.tensors = {path: info_of(path, leaf) for path, leaf in self.leaves.items()}
        self.metadata, self.files = {}, ()

    def read(self, name: str) -> np.ndarray:
        """One leaf as a numpy array, a view where it is contiguous in host memory."""
        return host(self.leaves[name], name)

    def close(self) -> None:
        """Nothing: the leaves are the caller's."""


def tensors_of(plan: Plan, tree: MemoryTree, *, copy: bool | None = None) -> dict[str, torch.Tensor]:
    """The targets of `plan`, which reads leaves of `tree`, as torch tensors on the CPU.

    A sharded leaf is copied shard by shard into the tensor; it is never assembled in its own layout first.
    `CheckpointError` for an element type that torch has in name only: such a tensor cannot even be printed.
    """
    for info in plan.targets.values():
        if not torch_stores(info.dtype):
            wider = "uint8" if info.dtype == "uint4" else "int8" if info.dtype == "int4" else "another dtype"
            message = f"is {info.dtype}, with which torch cannot compute; cast it to {wider}"
            raise CheckpointError(message, tensor=info.name)
    with Threads(_THREADS) as threads:
        made = [threads.submit(_tensors, step, tree, copy) for step in plan.steps]
        return {name: tensor for tensors in made for name, tensor in tensors.result().items()}


def tree_of(
    plan: Plan,
    read: Callable[[str], np.ndarray],
    *,
    framework: Framework = "numpy",
    shardings: Shardings = None,
    copy: bool | None = None,
) -> Tree:
    """The targets of `plan` as a nested dict of arrays of `framework`.

    read: a torch tensor by name, as a numpy view of its memory. shardings: where jax is to put the leaves.
    """
    place = placing(framework, shardings, copy=copy)
    leaves: dict[str, Any] = {}
    for step in plan.steps:  # on this thread: jax's settings may be thread-local
        views = step.run([read(name) for name in step.sources])
        leaves |= {info.name: place(info.name, view) for info, view in zip(step.targets, views, strict=True)}
    return nested(leaves)


def placing(
    framework: Framework, shardings: Shardings, *, copy: bool | None = None
) -> Callable[[str, np.ndarray], Any]:
    """A function (path, numpy view) -> the leaf as an array of `framework`, placed on its devices."""
    if framework not in ("numpy", "jax"):
        raise ValueError(f"framework={framework!r}; it is 'numpy' or 'jax'")
    if shardings is not None and framework != "jax":
        raise ValueError("shardings are jax's: pass framework='jax' with them")
    if framework == "numpy":
        return lambda path, view: copied(view) if copy else view
    placed = _by_path(shardings)
    return lambda path, view: to_jax(view, path, sharding=placed(path), copy=copy is not False)


def shaped_like(tree: Tree, template: Any) -> Tree:
    """The arrays of `tree` as `nnx.update(template, ...)` takes them: `template` is an nnx module or its state.

    List positions are integer keys there, and batch statistics are among the parameters. `CheckpointError` for an array
    without a variable, and for a parameter or a statistic without an array.
    """
    leaves = flat(tree)
    made = _filled_like(_plain(template, keep_keys=True), "", leaves)
    if leaves:
        raise CheckpointError("has no place in the module that is to be filled", tensor=next(iter(leaves)))
    return made


def _filled_like(node: Mapping[Any, Any], path: str, leaves: dict[str, Any]) -> dict[Any, Any]:
    """`node` with its leaves taken from `leaves`; RNG state, which no tree has, is left out."""
    made: dict[Any, Any] = {}
    for key, child in node.items():
        here = f"{path}{key}"
        if isinstance(child, Mapping):
            if inside := _filled_like(child, f"{here}/", leaves):
                made[key] = inside
            continue
        collection = "batch_stats" if _is_kind(child, "BatchStat") else "params"
        name = next((name for name in (here, f"{collection}/{here}") if name in leaves), None)
        if name is not None:
            made[key] = leaves.pop(name)
        elif _is_kind(child, "Param") or collection == "batch_stats":
            raise CheckpointError("is missing, and the module that is to be filled has it", tensor=here)
    return made


def _boxed_leaves(tree: Any) -> dict[str, Any]:
    """Every array by its path, in flax's boxes; nnx's RNG state is not a weight and is left out."""
    return {path: leaf for path, leaf in flat(_plain(tree)).items() if not _is_kind(leaf, "RngState")}


def _by_collection(boxed: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays in the boxes; where some are nnx's batch statistics, by linen's collections."""
    statistics = {path for path, leaf in boxed.items() if _is_kind(leaf, "BatchStat")}
    leaves = {path: _unboxed(leaf) for path, leaf in boxed.items()}
    if not statistics:
        return leaves
    # nnx tells them by their kind, linen by their place.
    return {f"{'batch_stats' if path in statistics else 'params'}/{path}": leaf for path, leaf in leaves.items()}


def _plain(tree: Any, keep_keys: bool = False) -> Mapping[Any, Any]:
    """`tree` as nested mappings; keys are text unless `keep_keys`."""
    children = _children(tree)
    if children is None:
        raise TypeError(
            f"{type(tree).__name__} is no tree of arrays; give a dict, a TrainState, an nnx.State or an nnx.Module"
        )
    return {
        key if keep_keys else str(key): child if _children(child) is None else _plain(child, keep_keys)
        for key, child in children.items()
    }


def _children(value: Any) -> Mapping[Any, Any] | None:
    """The children of a node of a tree, by key; None for a leaf."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if any(f"{kind.__module__}.{kind.__qualname__}" in _NNX_NODES for kind in type(value).__mro__):
        from flax import nnx

        return nnx.state(value)
    # linen's boxes are dataclasses too. Functions (`apply_fn`, `tx`) are marked as static fields.
    if is_dataclass(value) and not isinstance(value, type) and not hasattr(value, "unbox"):
        listed = [one for one in fields(value) if one.metadata.get("pytree_node", True)]
        return {one.name: getattr(value, one.name) for one in listed}
    return None


def _is_kind(leaf: Any, name: str) -> bool:
    """Whether a leaf is the kind of `nnx.Variable` called `name`."""
    return any(kind.__name__ == name and kind.__module__.startswith("flax.nnx") for kind in type(leaf).__mro__)


def _unboxed(leaf: Any) -> Any:
    """The array in an `nnx.Variable`, or in `linen`'s boxes for partitioned parameters."""
    for method in ("get_value", "unbox"):
        if hasattr(leaf, method):
            return getattr(leaf, method)()
    return leaf


def info_of(path: str, leaf: Any) -> TensorInfo:
    """The metadata of a leaf; `CheckpointError` for anything but an array of numbers."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    name = str(leaf.dtype).removeprefix("torch.")
    if not is_dtype(name):
        raise CheckpointError(f"is of dtype {name}, not an array of numbers", tensor=path)
    return TensorInfo(path, tuple(leaf.shape), name)


def _filled(step: Step, leaf: Any) -> np.ndarray | None:
    """The one target of `step` filled from the shards of `leaf`, through a view of it in the leaf's own layout.

    None where the layouts differ by more than a view, as for a leaf that is several tensors.
    """
    if len(step.targets) != 1:
        return None
    target = empty(step.targets[0].shape, leaf.dtype)
    back = as_leaf(step, target)
    if back is None or back.shape != tuple(leaf.shape):
        return None
    fill(back, whole(leaf.shape), leaf, step.sources[0])
    return target


def as_leaf(step: Step, target: np.ndarray) -> np.ndarray | None:
    """The one target of a step that reads one leaf, seen in the leaf's layout; None where that is no view of it."""
    if step.transform.parts != 1:
        return None
    back = step.transform.to_flax([target]) if step.reverse else step.transform.to_torch(target)[0]
    return back if np.may_share_memory(back, target) else None


def _tensors(step: Step, tree: MemoryTree, copy: bool | None) -> dict[str, torch.Tensor]:
    import torch

    for info in step.targets:
        if not isinstance(getattr(torch, info.dtype, None), torch.dtype):
            raise CheckpointError(f"is {info.dtype}, which torch does not have; cast it", tensor=info.name)
    leaves = [tree.leaves[name] for name in step.sources]
    if len(leaves) == 1 and is_sharded(leaves[0]):
        filled = _filled(step, leaves[0])
        if filled is not None:
            return {step.targets[0].name: from_numpy(filled)}
    arrays = [host(leaf, name) for leaf, name in zip(leaves, step.sources, strict=True)]
    views = step.run(arrays)
    return {info.name: _tensor(view, arrays, leaves, copy) for info, view in zip(step.targets, views, strict=True)}


def _tensor(view: np.ndarray, arrays: list[np.ndarray], leaves: list[Any], copy: bool | None) -> torch.Tensor:
    if not _shares(view, arrays):
        return from_numpy(view if view.flags.writeable and view.flags.c_contiguous else copied(view))
    wanted = copy is False or (copy is None and view.flags.c_contiguous and not is_jax(leaves[0]))
    shared = share(leaves[0], view) if wanted and len(leaves) == 1 else None
    return from_numpy(copied(view)) if shared is None else shared


def _shares(view: np.ndarray, arrays: list[np.ndarray]) -> bool:
    return any(np.may_share_memory(view, array) for array in arrays)


def _by_path(shardings: Shardings) -> Callable[[str], Any]:
    """`shardings`, one for all, a tree or a function, as a function of the path."""
    if shardings is None or hasattr(shardings, "device_set"):
        return lambda path: shardings
    if callable(shardings):
        by_path: Callable[[str], Any] = shardings
        return by_path
    given = flat(_plain(shardings))

    def placed(path: str) -> Any:
        if path not in given:
            raise CheckpointError("has no place in `shardings`; give it one, None for jax's default", tensor=path)
        return given[path]

    return placed
