"""Trees of arrays in memory: what `flax.linen` and `flax.nnx` hold as torch tensors, and torch tensors as such a tree.

A tree is anything nested with arrays of jax, numpy or torch at its ends: a dict, a `FrozenDict`, `{"params": ...}` with
or without `batch_stats`, an `nnx.State`, an `nnx.Module`, a pure dict whose ends are called `value`. Flax is not
imported: its objects are known by what they can do.

Sharing memory, `copy`: None shares with numpy arrays and never with jax's, which are immutable; True shares nothing;
False shares wherever the layouts allow, a transposed weight being a strided view of the leaf. Then writing on one side
(an optimizer's step, for one) changes the other, and programs jax has compiled may or may not see it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from easytorch.bridge.closing import Closing
from easytorch.bridge.dtypes import numpy_dtype
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.base import TensorInfo
from easytorch.bridge.jax_arrays import copied, empty, fill, from_numpy, host, is_jax, is_sharded, share, to_jax, whole
from easytorch.bridge.plan import Plan, Step
from easytorch.bridge.trees import flat, nested
from easytorch.bridge.unwrap import unwrapped

if TYPE_CHECKING:
    import torch

Tree = dict[str, Any]
Framework = Literal["numpy", "jax"]
# A jax.sharding.Sharding for all leaves, a tree of them, or what gives one for a leaf's path ("a/b/kernel"), or None.
Shardings = Any


# Copies wait for memory: a few at a time are as fast as it is.
_THREADS = 4


class MemoryTree(Closing):
    """A tree as an open checkpoint: its leaves by path, wrappers taken off as from a file (`bridge.unwrap`).

    as_stored: leaves them on.
    """

    metadata: Mapping[str, str]
    files: tuple[Path, ...]

    def __init__(self, tree: Any, *, as_stored: bool = False) -> None:
        given = leaves_of(tree)
        infos = {path: info_of(path, leaf) for path, leaf in given.items()}
        names, left_out = ({path: path for path in given}, ()) if as_stored else unwrapped(infos)
        self.left_out: tuple[str, ...] = left_out
        self.leaves = {path: given[name] for path, name in names.items()}
        self.tensors = {path: info_of(path, leaf) for path, leaf in self.leaves.items()}
        self.metadata, self.files = {}, ()

    def read(self, name: str) -> np.ndarray:
        """One leaf as a numpy array, a view where it is in this machine's memory in one piece."""
        return host(self.leaves[name], name)

    def close(self) -> None:
        """Nothing: the leaves are the caller's."""


def tensors_of(plan: Plan, tree: MemoryTree, *, copy: bool | None = None) -> dict[str, torch.Tensor]:
    """The targets of `plan`, which reads leaves of `tree`, as torch tensors on the CPU.

    A sharded leaf is copied shard by shard into the tensor; it is never assembled in its own layout first.
    """
    with ThreadPoolExecutor(_THREADS) as threads:
        made = threads.map(lambda step: _tensors(step, tree, copy), plan.steps)
        return {name: tensor for tensors in made for name, tensor in tensors.items()}


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
    for step in plan.steps:  # on this thread: jax's settings may be those of a thread
        views = step.run([read(name) for name in step.sources])
        leaves |= {info.name: place(info.name, view) for info, view in zip(step.targets, views, strict=True)}
    return nested(leaves)


def placing(
    framework: Framework, shardings: Shardings, *, copy: bool | None = None
) -> Callable[[str, np.ndarray], Any]:
    """What makes a leaf, given its path and a numpy view of its elements, an array of `framework` in its place."""
    if framework not in ("numpy", "jax"):
        raise ValueError(f"framework={framework!r}; it is 'numpy' or 'jax'")
    if shardings is not None and framework != "jax":
        raise ValueError("shardings are jax's: pass framework='jax' with them")
    if framework == "numpy":
        return lambda path, view: copied(view) if copy else view
    placed = _by_path(shardings)
    return lambda path, view: to_jax(view, path, sharding=placed(path), copy=copy is not False)


def leaves_of(tree: Any) -> dict[str, Any]:
    """Every array by its path, out of flax's boxes; what nnx keeps for random numbers is no weight and left out."""
    boxed = {path: leaf for path, leaf in flat(_plain(tree)).items() if not _is_kind(leaf, "RngState")}
    statistics = {path for path, leaf in boxed.items() if _is_kind(leaf, "BatchStat")}
    leaves = {path: _unboxed(leaf) for path, leaf in boxed.items()}
    if not statistics:
        return leaves
    # nnx tells them by their kind, linen by their place.
    return {f"{'batch_stats' if path in statistics else 'params'}/{path}": leaf for path, leaf in leaves.items()}


def _plain(tree: Any) -> Mapping[str, Any]:
    if isinstance(tree, Mapping):
        return {str(key): _plain(child) if _is_branch(child) else child for key, child in tree.items()}
    if isinstance(tree, list | tuple):
        return {str(place): _plain(child) if _is_branch(child) else child for place, child in enumerate(tree)}
    if _is_module(tree):
        from flax import nnx

        return _plain(nnx.state(tree))
    raise TypeError(f"{type(tree).__name__} is no tree of arrays; give a dict, an nnx.State or an nnx.Module")


def _is_branch(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple) or _is_module(value)


def _is_module(value: Any) -> bool:
    return any(f"{kind.__module__}.{kind.__qualname__}" == "flax.nnx.module.Module" for kind in type(value).__mro__)


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
    """What a leaf is; `CheckpointError` for what is no array of numbers."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    name = str(leaf.dtype).removeprefix("torch.")
    if numpy_dtype(name) is None:
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
    """`shardings`, however given, as a function of the path."""
    if shardings is None or hasattr(shardings, "device_set"):
        return lambda path: shardings
    if callable(shardings):
        return shardings
    given = flat(_plain(shardings))

    def placed(path: str) -> Any:
        if path not in given:
            raise CheckpointError("has no place in `shardings`; give it one, None for jax's default", tensor=path)
        return given[path]

    return placed
