"""Device meshes whose axes have names, and the sizes of an axis by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# In the order of a mesh's dimensions: neighbouring ranks differ in the last, which communicates most.
AXES = {
    "dp": "replicas of the model, each with its own data",
    "fsdp": "shards of each weight, gathered where they are used; each rank has its own data",
    "pp": "stages of layers",
    "ep": "shards of the experts; each rank has its own data",
    "sp": "shards of each sequence; the ranks are given the same data",
    "tp": "shards of each matmul; the ranks are given the same data",
}
DATA = ("dp", "fsdp", "ep")  # axes whose ranks have data of their own


def mesh_axis_sizes(mesh: Any) -> dict[str, int]:
    """Axis name -> size of a torch `DeviceMesh`, a torch_xla `Mesh` or such a mapping; empty for None."""
    if mesh is None or isinstance(mesh, Mapping):
        return dict(mesh or {})
    if hasattr(mesh, "mesh_dim_names"):
        return dict(zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=False))
    return dict(zip(mesh.axis_names, mesh.mesh_shape, strict=True))


def parse_axes(axes: str | Mapping[str, int], devices: int) -> dict[str, int]:
    """{"fsdp": 4, "tp": 2} of "fsdp=-1,tp=2" and 8 devices, in the order of `AXES`.

    One size may be -1 for the remaining devices. `ValueError` where they do not make up `devices`.
    """
    given = _parse(axes) if isinstance(axes, str) else dict(axes)
    if not given:
        raise ValueError(f"a mesh needs axes, as in 'fsdp=-1,tp=2'; they are {', '.join(AXES)}")
    for name, size in given.items():
        if name not in AXES:
            raise ValueError(f"a mesh has no axis {name!r}; the axes are {', '.join(AXES)}")
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
            raise ValueError(f"the axis {name} has {size!r} devices: give 1 or more, or -1 for the remaining ones")
    rest = [name for name, size in given.items() if size == -1]
    if len(rest) > 1:
        raise ValueError(f"only one axis can be -1, the remaining devices, not {' and '.join(rest)}")
    named = math.prod(size for size in given.values() if size != -1)
    words = ", ".join(f"{name}={size}" for name, size in given.items())
    if devices % named or (not rest and devices != named):
        raise ValueError(
            f"the mesh {words} needs {'a multiple of ' if rest else ''}{named} device{'s' if named > 1 else ''}, "
            f"and there {'are' if devices > 1 else 'is'} {devices}"
        )
    return {name: devices // named if given[name] == -1 else given[name] for name in AXES if name in given}


def make_mesh(axes: str | Mapping[str, int], device_type: str = "cpu", *, timeout: float | None = None) -> Any:
    """The `DeviceMesh` of all ranks of the process group; each of them calls this. axes: as `parse_axes` takes them.

    device_type: "xla" is the torch_xla `Mesh` of all devices, over which this one process computes by SPMD.
    timeout: seconds that a stage of "pp" waits for a message of another over gloo; None waits as long as the process
    group's collectives did when it was made.
    """
    if not isinstance(axes, str | Mapping):
        raise TypeError(f"axes must be a text as 'fsdp=-1,tp=2', or a mapping of names to sizes, not {axes!r}")
    if device_type == "xla":
        from easytorch.distributed.xla_spmd import make_spmd_mesh

        return make_spmd_mesh(axes)
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    sizes = parse_axes(axes, dist.get_world_size())
    own: dict[int | str, Any] = {}
    if timeout is not None and device_type == "cpu" and sizes.get("pp", 1) > 1:
        # gloo takes the limit of messages when the group is made, and later ones for collectives alone
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout)
        own["pp"] = "gloo", options
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes), backend_override=own)


def without_axis(mesh: DeviceMesh, name: str) -> DeviceMesh | None:
    """The submesh of this rank with all axes but one; None where no other is left."""
    names = tuple(one for one in mesh.mesh_dim_names or () if one != name)
    if len(names) == mesh.ndim:
        return mesh
    return mesh[names] if names else None


def release_groups(mesh: DeviceMesh | None) -> None:
    """Release the process groups of a mesh (None for none) after `destroy_process_group`.

    torch (2.13) keeps them in the mesh, DTensor's caches keep the mesh, and the groups of gloo keep their threads.
    """
    getattr(mesh, "_pg_registry", {}).clear()


def _parse(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in filter(None, (one.strip() for one in text.split(","))):
        name, equals, size = (one.strip() for one in part.partition("="))
        if not equals or not size.removeprefix("-").isdecimal():
            raise ValueError(f"{part!r} is not an axis and its size, as in 'tp=2'")
        if name in found:
            raise ValueError(f"the axis {name} is given twice")
        found[name] = int(size)
    return found
