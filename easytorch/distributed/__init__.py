"""Models over several devices: meshes by name, and one declaration of weights' sharding for DTensor, torch_xla and jax.

The names load on first use: specs and rules need no `torch.distributed`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from easytorch.lazy_names import load_on_first_use

_EXPORTS = {
    "easytorch.distributed.declared": ("declared_sharding", "partition_specs"),
    "easytorch.distributed.mesh": ("AXES", "make_mesh", "mesh_axis_sizes", "parse_axes"),
    "easytorch.distributed.sharding": ("gather_model", "mesh_of", "params_sharding", "shard_model"),
    "easytorch.distributed.specs": (
        "PartitionSpec",
        "from_placements",
        "get_sharding",
        "stable_spec",
        "to_jax",
        "to_placements",
        "to_xla",
    ),
    "easytorch.distributed.xla_spmd": ("shard_batch",),
}
_HOME = {name: module for module, names in _EXPORTS.items() for name in names}

if TYPE_CHECKING:
    from easytorch.distributed.declared import declared_sharding as declared_sharding
    from easytorch.distributed.declared import partition_specs as partition_specs
    from easytorch.distributed.mesh import AXES as AXES
    from easytorch.distributed.mesh import make_mesh as make_mesh
    from easytorch.distributed.mesh import mesh_axis_sizes as mesh_axis_sizes
    from easytorch.distributed.mesh import parse_axes as parse_axes
    from easytorch.distributed.sharding import gather_model as gather_model
    from easytorch.distributed.sharding import mesh_of as mesh_of
    from easytorch.distributed.sharding import params_sharding as params_sharding
    from easytorch.distributed.sharding import shard_model as shard_model
    from easytorch.distributed.specs import PartitionSpec as PartitionSpec
    from easytorch.distributed.specs import from_placements as from_placements
    from easytorch.distributed.specs import get_sharding as get_sharding
    from easytorch.distributed.specs import stable_spec as stable_spec
    from easytorch.distributed.specs import to_jax as to_jax
    from easytorch.distributed.specs import to_placements as to_placements
    from easytorch.distributed.specs import to_xla as to_xla
    from easytorch.distributed.xla_spmd import shard_batch as shard_batch

__getattr__ = load_on_first_use(__name__, _HOME)
