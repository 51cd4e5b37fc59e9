"""Models over a mesh: each rank reads its own part of a checkpoint."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from easytorch.distributed.mesh import mesh_axis_sizes
from easytorch.distributed.sharding import shard_model
from easytorch.distributed.staged_call import pipeline_of
from easytorch.distributed.xla_spmd import is_spmd_mesh

# Checkpoints whose weights are not read tensor by tensor into the parameters.
_OTHERS = ("gguf_file", "quantization_config", "device_map", "distributed_config", "tp_plan", "tp_size")

_QUANTIZED = "a mesh does not go with a quantized checkpoint: load it on one device"


def class_over_mesh(model_class: Any, path: Any, mesh: Any, partition_rules: Any, kwargs: dict[str, Any]) -> Any:
    """`model_class`, whose instances are sharded over `mesh` when they are made, which `from_pretrained` does on the
    meta device: transformers' loader then reads of each tensor the part of this rank's shard alone.

    path, kwargs: of `from_pretrained`; `ValueError` for those that a mesh does not go with.
    """
    for name in _OTHERS:
        if kwargs.get(name) is not None:
            raise ValueError(f"mesh does not go with {name}: load the model without one of the two")
    if isinstance(path, str | os.PathLike) and (Path(path) / "adapter_config.json").is_file():
        raise ValueError("mesh does not go with an adapter's folder: load the model over it, then its adapter")
    if mesh is None:
        raise ValueError("partition_rules need a mesh: make_mesh('fsdp=-1') makes one of all ranks")
    sizes = mesh_axis_sizes(mesh)
    if not sizes:
        raise ValueError("the mesh's axes have no names: easytorch.distributed.make_mesh('fsdp=-1,tp=2') gives them")
    if is_spmd_mesh(mesh):
        return _class_by_spmd(model_class, mesh, partition_rules)

    def __init__(self: Any, *args: Any, **more: Any) -> None:
        model_class.__init__(self, *args, **more)
        if getattr(self.config, "quantization_config", None) is not None:
            raise ValueError(_QUANTIZED)
        self.__class__ = model_class
        shard_model(self, partition_rules, mesh)
        if pipeline_of(self) is not None:  # what the other stages read is not unexpected here
            self._keys_to_ignore_on_load_unexpected = {
                *(self._keys_to_ignore_on_load_unexpected or ()),
                *(f"^{re.escape(name)}$" for name in self.left_out_names()),
            }

    members = {"__init__": __init__, "__module__": model_class.__module__, "reads_parts": True}
    return type(model_class.__name__, (model_class,), members)


def _class_by_spmd(model_class: Any, mesh: Any, partition_rules: Any) -> Any:
    """`model_class` whose `from_pretrained` loads on the CPU and moves each weight to the devices of a torch_xla mesh,
    one after the other: the one process reads for all of them."""

    def from_pretrained(cls: type, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        loaded = model_class.from_pretrained(*args, output_loading_info=output_loading_info, **kwargs)
        model, info = loaded if output_loading_info else (loaded, None)
        if getattr(model.config, "quantization_config", None) is not None:
            raise ValueError(_QUANTIZED)
        shard_model(model, partition_rules, mesh)
        return (model, info) if output_loading_info else model

    load: Any = from_pretrained
    methods = {"from_pretrained": classmethod(load), "__module__": model_class.__module__}
    return type(model_class.__name__, (model_class,), methods)
