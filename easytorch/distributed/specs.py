"""Partition specs: for each dimension of a tensor one mesh axis name, a tuple of names (major first), or None.

jax's `PartitionSpec` as a plain tuple: what a module declares, and what DTensor's, torch_xla's and jax's notations are
derived from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec as JaxPartitionSpec
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

Axes = str | tuple[str, ...] | None
PartitionSpec = tuple[Axes, ...]


def axis_names(axes: Axes) -> tuple[str, ...]:
    """The mesh axes in one dimension's entry of a spec."""
    return (axes,) if isinstance(axes, str) else axes or ()


def entry(names: Iterable[str]) -> Axes:
    """One dimension's entry of a spec, for these mesh axes."""
    found = tuple(names)
    return found[0] if len(found) == 1 else found or None


def without_axes(spec: PartitionSpec, names: Iterable[str]) -> PartitionSpec:
    """`spec`, replicated over these axes."""
    gone = set(names)
    return tuple(entry(name for name in axis_names(axes) if name not in gone) for axes in spec)


def check_spec(spec: Any, ndim: int, what: str) -> PartitionSpec:
    """`spec` with None for the dimensions it leaves out; `ValueError` where it is none of `ndim` dimensions.

    None is the spec of a replicated tensor. what: the tensor's name in the message.
    """
    given = () if spec is None else spec
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise TypeError(f"{what}: a partition spec is a tuple of axis names and None, as ('tp', None), got {spec!r}")
    for axes in given:
        names = axes if isinstance(axes, tuple | list) else (axes,) if axes is not None else ()
        if not all(isinstance(name, str) for name in names):
            raise TypeError(f"{what}: {axes!r} in {tuple(given)} is not an axis name, tuple of names or None")
    entries = tuple(entry(axes) if isinstance(axes, tuple | list) else axes for axes in given)
    while len(entries) > ndim and entries[-1] is None:
        entries = entries[:-1]
    if len(entries) > ndim:
        raise ValueError(f"{what} has {ndim} dimension(s), and the spec {tuple(given)} has {len(given)}")
    every = [name for axes in entries for name in axis_names(axes)]
    if twice := sorted({name for name in every if every.count(name) > 1}):
        raise ValueError(
            f"{what}: the spec {tuple(given)} names {', '.join(twice)} twice: an axis shards one dimension"
        )
    return entries + (None,) * (ndim - len(entries))


def uneven_dimension(shape: Sequence[int], spec: PartitionSpec, sizes: Mapping[str, int]) -> str | None:
    """The reason why a dimension does not divide, with the sizes that would; None if every dimension divides evenly.

    An axis that the mesh lacks has one device.
    """
    for index, (length, axes) in enumerate(zip(shape, spec, strict=True)):
        names = [name for name in axis_names(axes) if sizes.get(name, 1) > 1]
        parts = math.prod(sizes[name] for name in names)
        if length % parts:
            fit = sorted({max(length // parts, 1) * parts, (length // parts + 1) * parts})
            over = " x ".join(f"{name}={sizes[name]}" for name in names)
            return (
                f"dimension {index} of {tuple(shape)}, {length}, does not divide over the {parts} devices of {over}; "
                f"{' or '.join(map(str, fit))} would"
            )
    return None


def stable_spec(
    state_ps: PartitionSpec | None = None,
    preserved_indices: list[int] | None = None,
    clone_ps: PartitionSpec | None = None,
    dep: PartitionSpec | bool | None = True,
    tensor: Tensor | None = None,
    sizes: Mapping[str, int] | None = None,
) -> PartitionSpec | None:
    """A spec of which only some axes are kept, fitted to a tensor: EasyDeL's `create_stable_sharding`.

    state_ps: the spec to start from. preserved_indices: the dimensions that stay partitioned; the others become
    None (replicated); None keeps `state_ps` as it is. clone_ps: the spec from which the entries of
    kept dimensions are taken instead of `state_ps`; `state_ps` may then be None. dep: None or False returns None.
    tensor: the spec is truncated or padded with None to its dimensions, with None where the mesh lacks an axis or
    does not divide the dimension evenly; () where nothing stays partitioned. sizes: of the mesh's axes; without them
    every entry is taken to fit.
    """
    if dep is None or dep is False:
        return None
    spec = state_ps
    if preserved_indices is not None:
        source = state_ps if clone_ps is None else clone_ps
        if source is None:
            return None
        length = len(source) if state_ps is None else len(state_ps)
        shared = min(length, len(source))
        outside = [index for index in preserved_indices if not -shared <= index < shared]
        if outside:
            raise ValueError(f"preserved_indices {outside} lie outside the {shared} dimensions of {source}")
        kept = {index % length for index in preserved_indices}
        spec = tuple(source[index] if index in kept else None for index in range(length))
    return spec if tensor is None or spec is None else _fitted(spec, tensor.shape, sizes or {})


def _fitted(spec: PartitionSpec, shape: Sequence[int], sizes: Mapping[str, int]) -> PartitionSpec:
    fitted: list[Axes] = [None] * len(shape)
    for dimension, (length, axes) in enumerate(zip(shape, spec, strict=False)):
        names = axis_names(axes)
        if not sizes or (
            all(name in sizes for name in names) and length % math.prod(sizes[name] for name in names) == 0
        ):
            fitted[dimension] = axes
    return tuple(fitted) if any(axes is not None for axes in fitted) else ()


def to_placements(spec: PartitionSpec, mesh: DeviceMesh) -> tuple[Placement, ...]:
    """DTensor's placements, one for each dimension of the mesh; axes that the mesh lacks have one device.

    Where a dimension is sharded over several axes in another order than the mesh's, the later axis of the mesh is the
    major one, which DTensor calls a strided shard: FSDP2 over tensor parallel weights is so.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    sizes = mesh_sizes(mesh)
    order = list(sizes)
    placements: list[Placement] = [Replicate() for _ in order]
    for dim, axes in enumerate(spec):
        names = [name for name in axis_names(axes) if name in sizes]
        for position, name in enumerate(names):
            # axes that are more significant here, and come later in the mesh
            ahead = math.prod(sizes[one] for one in names[:position] if order.index(one) > order.index(name))
            place = _StridedShard(dim, split_factor=ahead) if ahead > 1 else Shard(dim)
            placements[order.index(name)] = place
    return tuple(placements)


def from_placements(placements: Sequence[Placement], mesh: DeviceMesh, ndim: int) -> PartitionSpec:
    """The spec of a DTensor's placements; those other than shards (replicated, partial) name no dimension."""
    sharded = [
        (name, placement, dim % ndim)
        for name, placement in zip(mesh_sizes(mesh), placements, strict=True)
        if (dim := getattr(placement, "dim", None)) is not None
    ]
    axes: list[list[str]] = [[] for _ in range(ndim)]
    for strided in (False, True):
        for name, placement, dim in sharded:
            if (getattr(placement, "split_factor", 1) > 1) == strided:
                axes[dim].append(name)
    return tuple(entry(one) for one in axes)


def mesh_sizes(mesh: DeviceMesh) -> dict[str, int]:
    """Axis -> size, in the mesh's order; an axis without a name is `dim_<i>`."""
    names = mesh.mesh_dim_names or tuple(f"dim_{index}" for index in range(mesh.ndim))
    return dict(zip(names, mesh.shape, strict=True))


def to_jax(spec: PartitionSpec) -> JaxPartitionSpec:
    """jax's `PartitionSpec`."""
    from jax.sharding import PartitionSpec as JaxPartitionSpec

    return JaxPartitionSpec(*spec)


def to_xla(spec: PartitionSpec, axes: Sequence[str]) -> tuple[int | tuple[int, ...] | None, ...]:
    """The partition spec of `torch_xla.distributed.spmd.mark_sharding`: places in the mesh's axes instead of names.

    axes: the names of the mesh's axes, in order; an axis that is none of them has one device.
    """
    found: list[int | tuple[int, ...] | None] = []
    for one in spec:
        places = tuple(axes.index(name) for name in axis_names(one) if name in axes)
        found.append(places[0] if len(places) == 1 else places or None)
    return tuple(found)


def get_sharding(arr: Tensor) -> PartitionSpec | None:
    """The spec of a DTensor, one entry a dimension; None for any other tensor.

    An axis without a name is `dim_<i>`. Placements other than shards (replicated, partial) name no dimension.
    """
    mesh = getattr(arr, "device_mesh", None)
    return None if mesh is None else from_placements(getattr(arr, "placements"), mesh, arr.ndim)  # noqa: B009
