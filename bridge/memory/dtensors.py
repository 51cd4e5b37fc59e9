"""A sharded jax tree as torch `DTensor`s with the same placements: each process fills only its own shards.

The axes of the two meshes are matched by name: where jax splits a dimension over the axis "model", the tensor is
`Shard` on the mesh's dimension "model", along the dimension of torch's layout that this is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from easytorch.bridge.memory.jax_arrays import Region, empty, fill, from_numpy, is_jax
from easytorch.bridge.memory.tree import MemoryTree, as_leaf, tensors_of
from easytorch.bridge.rules.plan import Plan, Step

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh


def dtensors_of(plan: Plan, tree: MemoryTree, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """The targets of `plan`, which reads leaves of `tree`, as `DTensor`s on `mesh`, whose dimensions have names.

    What is not sharded, over none of the axes of `mesh` or in more than its order of dimensions unlike the leaf
    (stacked experts), is `Replicate`. `ValueError` for a mesh without names, or a dimension split over its axes in
    another order than theirs.
    """
    from torch.distributed.tensor import DTensor, Replicate

    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError(
            "give the mesh the names of jax's axes: init_device_mesh(..., mesh_dim_names=('data', 'model'))"
        )
    made: dict[str, torch.Tensor] = {}
    for step in plan.steps:
        axes = _axes(step, tree)
        split = {} if axes is None else _split(tree.leaves[step.sources[0]], names, step.sources[0])
        if axes is None or not split:
            for name, tensor in tensors_of(Plan([step]), tree, copy=True).items():
                made[name] = _placed(tensor, mesh, [Replicate()] * mesh.ndim, tensor.shape, DTensor)
            continue
        made[step.targets[0].name] = _local(step, tree, mesh, axes, split, DTensor)
    return made


def _local(
    step: Step, tree: MemoryTree, mesh: DeviceMesh, axes: tuple[int, ...], split: dict[str, int], dtensor: Any
) -> torch.Tensor:
    """This process's part of the target. axes: the dimension of torch that each of the leaf's is."""
    from torch.distributed.tensor import Replicate, Shard

    (info,) = step.targets
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "every process that calls this is in the mesh"
    region = [slice(0, size) for size in info.shape]
    placements: list[Any] = []
    for name, size, place in zip(mesh.mesh_dim_names or (), mesh.shape, coordinate, strict=True):
        if name not in split:
            placements.append(Replicate())
            continue
        dim = axes[split[name]]
        placements.append(Shard(dim))
        region[dim] = _chunk(region[dim], size, place)
    leaf = tree.leaves[step.sources[0]]
    target = empty(tuple(part.stop - part.start for part in region), leaf.dtype)
    back = as_leaf(step, target)
    assert back is not None, "axes are of a view"
    asked: Region = tuple(region[dim] for dim in axes)
    fill(back, asked, leaf, step.sources[0])
    return _placed(from_numpy(target), mesh, placements, info.shape, dtensor)


def _placed(
    local: torch.Tensor, mesh: DeviceMesh, placements: list[Any], shape: tuple[int, ...], dtensor: Any
) -> torch.Tensor:
    import torch

    strides = torch.empty(shape, device="meta").stride()
    local = local.to(mesh.device_type)
    placed: torch.Tensor = dtensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
    )
    return placed


def _axes(step: Step, tree: MemoryTree) -> tuple[int, ...] | None:
    """The dimension of the target that each of the leaf's is; None where layouts differ by more than their order."""
    if len(step.sources) != 1 or len(step.targets) != 1:
        return None
    probe = np.empty(step.targets[0].shape, np.uint8)  # never touched, so it takes no memory
    back = as_leaf(step, probe)
    if back is None or back.ndim != probe.ndim or back.shape != tree.tensors[step.sources[0]].shape:
        return None
    dims = list(range(probe.ndim))
    axes = []
    for size, stride in zip(back.shape, back.strides, strict=True):
        found = next((dim for dim in dims if (probe.shape[dim], probe.strides[dim]) == (size, stride)), None)
        if found is None:
            return None
        dims.remove(found)
        axes.append(found)
    return tuple(axes)


def _split(leaf: Any, names: tuple[str, ...], path: str) -> dict[str, int]:
    """Axis name -> the leaf's dimension that is split over it, for the axes of the mesh."""
    spec = getattr(getattr(leaf, "sharding", None), "spec", ()) if is_jax(leaf) else ()
    split: dict[str, int] = {}
    for dim, axes in enumerate(spec):
        listed = [axes] if isinstance(axes, str) else list(axes or ())
        found = [name for name in listed if name in names]
        if found != sorted(found, key=names.index):
            raise ValueError(
                f"{path}: dimension {dim} is split over {tuple(found)}, the mesh has them in the order {names}; "
                f"give a mesh with the axes in jax's order"
            )
        split |= dict.fromkeys(found, dim)
    return split


def _chunk(whole: slice, parts: int, place: int) -> slice:
    """The part that `torch.chunk` gives, as in `Shard`."""
    size = -(-(whole.stop - whole.start) // parts)
    return slice(min(whole.start + place * size, whole.stop), min(whole.start + (place + 1) * size, whole.stop))
