"""A model over the devices of a mesh, and back, by EasyDeL's names."""

from __future__ import annotations

import itertools
from typing import Any, Literal

import torch
from torch import nn

from easytorch.argument_types import check_types
from easytorch.distributed import staged_call, xla_spmd
from easytorch.distributed.mesh import AXES, DATA, mesh_axis_sizes, without_axis
from easytorch.distributed.refusals import check_sharding
from easytorch.distributed.rules import PartitionRules, specs_by_rules

Uneven = Literal["error", "replicate"]
# The dtypes that every backend of torch.distributed sends; the others go as bytes.
_SENT = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64)


@check_types()
def shard_model(
    model: nn.Module, partition_rules: PartitionRules | None = None, mesh: Any = None, uneven: Uneven = "error"
) -> Any:
    """`model`, sharded in place over the axes of `mesh`; each rank calls this; weights are broadcast from rank 0.

    Tensor parallelism over "tp" by the plan that the model declares, FSDP2 over "fsdp" and replicas over "dp", whose
    ranks pass their own part of a batch and get gradients averaged over them. So do those of "ep", over which the
    experts are divided, and nothing else. Over "sp" each rank computes its part of every sequence, of which all of them
    are given the whole (`easytorch.layers.sequence_parallel`). Over "pp" each rank keeps its stage of the layers alone:
    all of them call the model with the same batch and get its loss, or without labels its logits, and call backward
    (`easytorch.distributed.staged_call`). Without a mesh, or with one of a single device, the model is unchanged.

    partition_rules: pattern -> spec, as pairs or a mapping; the first that matches a parameter decides how it is
    stored, and a parameter that none matches is sharded as the model declares. Where that differs from the sharding a
    computation needs, the parameter is redistributed for each use: the results are the same.
    Over a mesh of torch_xla (`make_mesh(axes, "xla")`) one process computes for all devices: the model moves to them,
    and batches are to be divided by `shard_batch`. It supports dp, fsdp, ep and tp.
    uneven: a dimension that does not divide over "tp", or experts over "ep", is an error ("error"), or its attention,
    feed-forward network, experts or embedding are replicated on every rank ("replicate").
    `ValueError` for sizes that do not divide, and `NotImplementedError` for a model without a plan for an axis, leave
    the model as it was.
    """
    if uneven not in ("error", "replicate"):
        raise ValueError(f"uneven must be 'error' or 'replicate', got {uneven!r}")
    devices = _devices_of(mesh)
    if devices == 1:
        specs_by_rules(model, partition_rules)
        return model
    from torch.distributed.device_mesh import DeviceMesh

    if xla_spmd.is_spmd_mesh(mesh):
        _sizes_of(mesh)
        xla_spmd.shard(model, mesh, partition_rules, replicate=uneven == "replicate")
        return model
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"a mesh of {devices} devices must be a torch DeviceMesh, not {type(mesh).__name__}")
    sizes = _sizes_of(mesh)
    rules = specs_by_rules(model, partition_rules, sizes)
    if mesh_of(model) is not None:
        raise ValueError("the model is sharded already: gather_model undoes shard_model")
    check_sharding(model, sizes, rules, replicate=uneven == "replicate")
    over_sequence: Any = model if sizes.get("sp", 1) > 1 else None
    _broadcast(model, mesh)
    if sizes.get("pp", 1) > 1:
        staged_call.divide(model, mesh)
        own = dict(model.named_parameters(remove_duplicate=False))
        rules = {name: spec for name, spec in rules.items() if name in own}
        mesh = without_axis(mesh, "pp")
        if mesh is None:
            return model
    if sizes.get("tp", 1) > 1:
        from easytorch.distributed.tensor_parallel import parallelize

        parallelize(model, mesh["tp"] if mesh.ndim > 1 else mesh, rules, replicate=uneven == "replicate")
    experts: list[nn.Module] = []
    if sizes.get("ep", 1) > 1:
        from easytorch.distributed.expert_parallel import parallelize_experts

        experts = parallelize_experts(model, mesh, rules, replicate=uneven == "replicate")
    if (replicas := gradient_mesh(mesh)) is not None:
        from easytorch.distributed.fully_sharded import shard_fully

        shard_fully(model, replicas, rules, experts, gradient_mesh(mesh, ("dp", "sp")))
    if over_sequence is not None:
        over_sequence.shard_sequence(mesh["sp"] if mesh.ndim > 1 else mesh)
    return model


@check_types()
def gather_model(model: nn.Module, partition_rules: PartitionRules | None = None, mesh: Any = None) -> Any:
    """`model` with every parameter full on its device; those that are sharded are gathered, and tied ones stay tied."""
    _devices_of(mesh)
    specs_by_rules(model, partition_rules, mesh_axis_sizes(mesh) if mesh is not None else ())
    if xla_spmd.mesh_of(model) is not None:
        xla_spmd.gather(model)
        return model
    if any(hasattr(module, "reshard") for module in model.modules()):
        from easytorch.distributed import fully_sharded

        modules: list[Any] = list(model.modules())
        for module in modules:
            if hasattr(module, "reshard"):
                module.reshard()
        fully_sharded.undo(model)
    full: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, one in list(module._parameters.items()):
            if one is not None and hasattr(one, "full_tensor"):
                if id(one) not in full:
                    full[id(one)] = nn.Parameter(one.full_tensor().detach(), one.requires_grad)
                module._parameters[name] = full[id(one)]
        for name, buffer in list(module._buffers.items()):  # codes of experts
            if buffer is not None and hasattr(buffer, "full_tensor"):
                module._buffers[name] = buffer.full_tensor()
    if "_applied_ep_plan" in model.__dict__:
        from easytorch.distributed import expert_parallel

        expert_parallel.undo(model)
    over_sequence: Any = model
    if hasattr(over_sequence, "gather_sequence"):
        over_sequence.gather_sequence()
    if "_applied_tp_plan" in model.__dict__:
        from easytorch.distributed.tensor_parallel import undo

        undo(model)
    if staged_call.pipeline_of(model) is not None:
        staged_call.gather(model)
    return model


def full_tensors(model: nn.Module, *, keep: bool = True, trained: bool = False) -> dict[str, torch.Tensor]:
    """The state dict with full tensors on the CPU, gathered one at a time; tied weights stay one tensor.

    Each rank calls this; FSDP2 frees what an evaluation has left gathered when it is asked for a state dict.
    Of a model that is divided into stages they are those of all stages.
    keep: False on a rank that only takes part, whose tensors are empty. trained: of the parameters alone that are not
    frozen.
    """
    own = model.state_dict(keep_vars=True)
    if trained:
        own = {name: value for name, value in own.items() if value.requires_grad}
    if (pipeline := staged_call.pipeline_of(model)) is not None:
        return pipeline.gathered(own, keep=keep)
    full: dict[int, torch.Tensor] = {}
    state = {}
    for name, value in own.items():
        if id(value) not in full:
            gathered: Any = value.full_tensor() if hasattr(value, "full_tensor") else value
            full[id(value)] = gathered.detach().cpu() if keep else torch.empty(0)
        state[name] = full[id(value)]
    return state


@check_types()
def params_sharding(model: nn.Module) -> dict[str, tuple[Any, ...] | None]:
    """name -> the placements of a parameter over its device mesh, `(Shard(dim=0),)`; None without a mesh.

    Over a mesh of torch_xla, which has no placements, its partition spec, `("fsdp", None)`. Over "pp" the parameters
    are those of this rank's stage.
    """
    if xla_spmd.mesh_of(model) is not None:
        specs = xla_spmd.specs_of(model)
        return {name: specs[name] for name, _ in model.named_parameters()}
    placements = {name: getattr(one, "placements", None) for name, one in model.named_parameters()}
    return {name: None if found is None else tuple(found) for name, found in placements.items()}


def mesh_of(model: nn.Module) -> Any:
    """The device mesh that the model's parameters are sharded over, replicas included; None where none is."""
    if (mesh := xla_spmd.mesh_of(model)) is not None:
        return mesh
    if (pipeline := staged_call.pipeline_of(model)) is not None:
        return pipeline.mesh
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "reshard")]
    if modules and not any(hasattr(one, "device_mesh") for one in model.parameters()):
        for module in modules:  # a forward without a backward leaves replicas as plain tensors
            module.reshard()
    return next((one.device_mesh for one in model.parameters() if hasattr(one, "device_mesh")), None)


def gradient_mesh(mesh: Any, replicas: tuple[str, ...] = ("dp", "ep", "sp")) -> Any:
    """The submesh over which gradients are averaged: one axis for all of `replicas`, and "fsdp"; None for one rank."""
    from torch.distributed.device_mesh import DeviceMesh

    sizes = mesh_axis_sizes(mesh)
    names = tuple(name for name in replicas if sizes.get(name, 1) > 1)
    if not names and sizes.get("fsdp", 1) == 1:
        return None
    if mesh.ndim == 1:
        return mesh
    parts = []
    if names:
        parts.append(mesh[names]._flatten() if len(names) > 1 else mesh[names[0]])
    if "fsdp" in sizes:
        parts.append(mesh["fsdp"])
    if len(parts) == 1:
        return parts[0]
    if names == ("dp",):
        return mesh["dp", "fsdp"]
    if not hasattr(DeviceMesh, "_concatenate"):
        raise NotImplementedError(f"a mesh with the axes fsdp and {', '.join(names)} needs torch 2.10 or later")
    return DeviceMesh._concatenate(parts)


def data_place(mesh: Any) -> tuple[int, int]:
    """(the place of this rank among those that have data of their own, their number)."""
    place, places = 0, 1
    for name, size in mesh_axis_sizes(mesh).items():
        if name in DATA:
            place, places = place * size + mesh.get_local_rank(name), places * size
    return place, places


def _devices_of(mesh: Any) -> int:
    if mesh is None:
        return 1
    if type(mesh).__module__.partition(".")[0] in ("jax", "jaxlib"):
        raise TypeError(
            "a JAX mesh shards JAX arrays, not torch tensors; easytorch.distributed.make_mesh('fsdp=-1,tp=2') "
            "makes a DeviceMesh by the same axes"
        )
    size: Any = mesh.size() if callable(getattr(mesh, "size", None)) else getattr(mesh, "size", None)
    if xla_spmd.is_spmd_mesh(mesh):
        size = int(size)  # numpy's
    if not isinstance(size, int):
        raise TypeError(f"mesh must be a torch DeviceMesh, not {type(mesh).__name__}")
    return size


def _sizes_of(mesh: Any) -> dict[str, int]:
    sizes = mesh_axis_sizes(mesh)
    if not sizes:
        raise ValueError(f"the mesh's axes have no names: give mesh_dim_names, of {', '.join(AXES)}")
    return sizes


@torch.no_grad()
def _broadcast(model: nn.Module, mesh: Any) -> None:
    """Broadcast the values of the mesh's first rank to the others, along one axis after the other."""
    import torch.distributed as dist

    # Asking for it lays the codes of quantized layers as they are saved: bytes are sent as they lie, and on each rank
    # that is as the products that it has computed read them.
    model.state_dict()
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        source = dist.get_global_rank(group, 0)
        for one in itertools.chain(model.parameters(), model.buffers()):
            if one.is_meta:
                continue
            if one.dtype in _SENT and one.is_contiguous():
                dist.broadcast(one, source, group)
                continue
            data = one.detach()
            whole = data.contiguous()
            dist.broadcast(whole.view(-1).view(torch.uint8), source, group)
            if not data.is_contiguous():
                data.copy_(whole)
