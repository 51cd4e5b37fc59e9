"""Which ranks form the ring of a sharded sequence, read off `OperationMetadata.mesh`."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist

from easytorch.distributed.mesh import mesh_axis_sizes
from easytorch.kernels.ring.exchange import devices_of
from easytorch.operations.dispatch.metadata import OperationMetadata

AXES = ("sp", "cp", "sequence", "context", "seq")


class Placement(NamedTuple):
    """group: the name of the process group of the ring, "" for this process alone. size: its ranks.

    devices: the device types whose tensors the group sends. axis: the axis of a torch_xla mesh over which one process
    shards the sequence (SPMD).
    """

    group: str = ""
    size: int = 1
    devices: tuple[str, ...] = ()
    axis: str | None = None


def placement_of(metadata: OperationMetadata) -> Placement | str:
    """The ring of this process, or why there is none."""
    mesh = metadata.mesh
    if mesh is None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            return (
                f"torch.distributed has {dist.get_world_size()} processes and the ring none of them: pass the mesh or "
                f"process group that shards the sequence as OperationMetadata(mesh=...)"
            )
        return Placement()
    if dist.is_available() and isinstance(mesh, dist.ProcessGroup):
        return _unnamed(metadata) or _grouped(mesh)
    if not hasattr(mesh, "mesh_dim_names") and not hasattr(mesh, "axis_names"):
        return f"the mesh must be a DeviceMesh, a process group or a torch_xla Mesh, got {type(mesh).__name__}"
    sizes = mesh_axis_sizes(mesh)
    if hasattr(mesh, "mesh_dim_names") and not sizes and mesh.ndim == 1:
        return _unnamed(metadata) or _grouped(mesh.get_group())
    axis = _axis_of(tuple(sizes), metadata.sequence_axis)
    if axis is None:
        return (
            f"no axis of the mesh ({', '.join(sizes) or 'they have no names'}) is known to shard the sequence: name "
            f"one with OperationMetadata(sequence_axis=...), or call it {' or '.join(AXES)}"
        )
    if hasattr(mesh, "mesh_dim_names"):
        return _grouped(mesh.get_group(axis))
    return Placement(size=sizes[axis], axis=axis)


def _unnamed(metadata: OperationMetadata) -> str | None:
    """Why the axes of what has no names cannot be chosen from, or None where none is chosen."""
    if metadata.sequence_axis is None:
        return None
    return (
        f"OperationMetadata(sequence_axis={metadata.sequence_axis!r}) names an axis, and the process group or mesh has "
        f"no names: leave it out, or give a DeviceMesh with mesh_dim_names"
    )


def _axis_of(names: tuple[str, ...], wanted: str | None) -> str | None:
    """The axis `wanted`, else one with a usual name, else the only one."""
    known = (wanted,) if wanted is not None else (*AXES, *names[: len(names) == 1])
    return next((name for name in known if name in names), None)


def _grouped(group: dist.ProcessGroup) -> Placement | str:
    if group.size() == 1:
        return Placement()
    if group.rank() < 0:
        return "this process is not part of the group that shards the sequence"
    return Placement(group.group_name, group.size(), devices_of(group))


def refusal(placement: Placement | str, platform: str) -> str | None:
    """None, or why tensors of `platform` cannot go round this ring."""
    if isinstance(placement, str):
        return placement
    if placement.axis is not None and platform != "tpu":
        return f"a torch_xla mesh shards tensors on the xla device, these are on {platform}: give a DeviceMesh"
    if not placement.group:
        return None
    if platform == "tpu":
        return "on xla devices the ring is part of the compiled program: give a torch_xla Mesh (SPMD)"
    device = {"rocm": "cuda", "native": "cpu"}.get(platform, platform)
    if device not in placement.devices:
        return (
            f"the process group sends no {device} tensors from rank to rank, only {', '.join(placement.devices)}: "
            f"initialize it with {'nccl' if device == 'cuda' else 'gloo'}"
        )
    return None
