"""torch_xla's SPMD: one process computes for all devices of a mesh, and XLA's partitioner divides its programs.

Weights are annotated with the specs that the model declares, the outputs of layers and batches with the axes that have
data of their own; the collectives follow from these. Over "fsdp" a layer's weights are gathered where they are used,
and their gradients are reduced to shards, as by torch_xla's `SpmdFullyShardedDataParallel`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from easytorch.distributed import xla_experts
from easytorch.distributed.declared import expanded_plan, partition_specs
from easytorch.distributed.mesh import DATA, mesh_axis_sizes, parse_axes
from easytorch.distributed.rules import PartitionRules, specs_by_rules
from easytorch.distributed.specs import PartitionSpec, axis_names, entry, to_xla, without_axes
from easytorch.distributed.xla_experts import EXPERTS
from easytorch.tpu_platform import device_count, use_spmd

if TYPE_CHECKING:
    from torch_xla.distributed.spmd import Mesh

AXES = ("dp", "fsdp", "ep", "tp")
_STATE = "_xla_spmd"  # of the model: what `gather` undoes


class _Sharded:
    """The mesh of a model, the spec of each parameter, and the hooks that annotate the outputs of layers."""

    def __init__(self, mesh: Mesh, specs: Mapping[str, PartitionSpec], hooks: list[Any], experts: list[str]) -> None:
        self.mesh, self.specs, self.hooks, self.experts = mesh, dict(specs), hooks, experts


def is_spmd_mesh(mesh: Any) -> bool:
    """Whether it is a mesh of torch_xla, over which one process computes."""
    return type(mesh).__module__.partition(".")[0] == "torch_xla"


def make_spmd_mesh(axes: str | Mapping[str, int]) -> Mesh:
    """The mesh of all devices of torch_xla, which this process is then to use by SPMD.

    It becomes torch_xla's global mesh, by which kernels find the axes of their arrays. axes: as for `parse_axes`. To be
    called before the first backward pass of the process: autograd then makes a queue for each device that it knows.
    """
    import numpy as np
    import torch_xla.distributed.spmd as xs

    count = device_count("xla")
    sizes = parse_axes(axes, count)
    check_axes(sizes)
    use_spmd()
    mesh = xs.Mesh(np.arange(count), tuple(sizes.values()), tuple(sizes))
    xs.set_global_mesh(mesh)
    return mesh


def shard(model: nn.Module, mesh: Mesh, partition_rules: PartitionRules | None, *, replicate: bool) -> None:
    """Move the model to the devices of the mesh, each parameter sharded by its spec, one after the other.

    replicate: modules whose sizes do not divide over "tp" are replicated on every device; else they are an error.
    """
    import torch_xla
    import torch_xla.distributed.spmd as xs

    sizes = mesh_axis_sizes(mesh)
    check_axes(sizes)
    if _STATE in model.__dict__:
        raise ValueError("the model is sharded already: gather_model undoes shard_model")
    if absent := [name for name, one in model.named_parameters() if one.is_meta]:
        raise ValueError(f"{absent[0]} has no values: load the model before it is sharded over a mesh of torch_xla")
    specs, whole = _specs(model, mesh, partition_rules, replicate=replicate)
    use_spmd()
    xs.set_global_mesh(mesh)
    device = torch_xla.device()
    moved: dict[int, nn.Parameter] = {}
    for name, one in list(model.named_parameters(remove_duplicate=False)):
        if id(one) not in moved:
            parameter = nn.Parameter(one.detach().to(device), requires_grad=one.requires_grad)
            mark(parameter, mesh, specs[name])
            moved[id(one)] = parameter
        module, _, key = name.rpartition(".")
        model.get_submodule(module)._parameters[key] = moved[id(one)]
    for owner in model.modules():
        for key, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[key] = buffer.to(device)
    tie: Any = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()
    hooks = _annotate_outputs(model, mesh, specs) if data_axes(mesh) else []
    experts = xla_experts.divide_experts(model, mesh, whole, replicate=replicate)
    model.__dict__[_STATE] = _Sharded(mesh, specs, hooks, experts)


def gather(model: nn.Module) -> None:
    """Undo `shard`: every device holds each parameter in full. Without effect on a model that is not sharded by it."""
    import torch_xla
    import torch_xla.distributed.spmd as xs

    state: _Sharded | None = model.__dict__.pop(_STATE, None)
    if state is None:
        return
    for hook in state.hooks:
        hook.remove()
    xla_experts.undo(model, state.experts)
    torch_xla.sync()  # what is pending was annotated
    for parameter in model.parameters():
        xs.clear_sharding(parameter)


def mesh_of(model: nn.Module) -> Any:
    """The mesh of torch_xla that the model is sharded over; None for any other model."""
    state: _Sharded | None = model.__dict__.get(_STATE)
    return None if state is None else state.mesh


def specs_of(model: nn.Module) -> dict[str, PartitionSpec]:
    """Parameter name -> its spec over the mesh; a tied weight by each of its names."""
    state: _Sharded = model.__dict__[_STATE]
    return dict(state.specs)


def shard_batch(batch: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """The tensors of a batch, (N, ...), on the devices of the mesh, their rows divided over the axes with own data.

    Tensors that are one stay one. `ValueError` where the rows do not divide.
    """
    import torch_xla

    axes, sizes = data_axes(mesh), mesh_axis_sizes(mesh)
    moved: dict[int, Tensor] = {}
    for name, one in batch.items():
        if id(one) in moved:
            continue
        if not divides(one, mesh):
            over = " x ".join(f"{axis}={sizes[axis]}" for axis in axes)
            raise ValueError(f"{name} has {one.shape[0]} rows, which do not divide over the devices of {over}")
        moved[id(one)] = one.to(torch_xla.device())
        if one.dim():
            mark(moved[id(one)], mesh, (entry(axes), *(None,) * (one.dim() - 1)))
    return {name: moved[id(one)] for name, one in batch.items()}


def divides(tensor: Tensor, mesh: Mesh) -> bool:
    """Whether the rows of a tensor divide over the devices that have data of their own."""
    sizes = mesh_axis_sizes(mesh)
    return tensor.dim() == 0 or tensor.shape[0] % math.prod(sizes[name] for name in data_axes(mesh)) == 0


def shard_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Divide what the optimizer keeps of each parameter, and has its shape, as the parameter is."""
    state: _Sharded = model.__dict__[_STATE]
    specs = {id(one): state.specs[name] for name, one in model.named_parameters()}
    for parameter, own in optimizer.state.items():
        for value in own.values():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.device.type == "xla":
                mark(value, state.mesh, specs[id(parameter)])


def data_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes of more than one device whose devices have data of their own."""
    return tuple(name for name, size in mesh_axis_sizes(mesh).items() if name in DATA and size > 1)


def mark(tensor: Tensor, mesh: Mesh, spec: PartitionSpec) -> None:
    """Annotate a tensor of torch_xla with a spec, in place; axes that the mesh lacks have one device."""
    import torch_xla.distributed.spmd as xs

    names = tuple(mesh.axis_names or ())
    if any(axis_names(axes) for axes in spec):
        xs.mark_sharding(tensor, mesh, to_xla(spec, names))


def _specs(
    model: nn.Module, mesh: Mesh, partition_rules: PartitionRules | None, *, replicate: bool
) -> tuple[dict[str, PartitionSpec], set[str]]:
    """(parameter -> its spec, the modules and parameters that are not divided over "tp" though their plan says so)."""
    from easytorch.distributed.expert_parallel import check_experts, divisible_experts
    from easytorch.distributed.tensor_parallel import AXIS, checked_plan

    sizes = mesh_axis_sizes(mesh)
    specs = partition_specs(model, partition_rules, mesh)
    rules = specs_by_rules(model, partition_rules, sizes)
    if sizes.get(EXPERTS, 1) > 1:
        check_experts(model, sizes[EXPERTS], rules, replicate=replicate)
        divided = divisible_experts(model, sizes[EXPERTS], replicate=replicate)
        inside = {f"{name}.{key}" for name in divided for key, _ in model.get_submodule(name).named_parameters()}
        specs = {
            name: spec if name in inside or name in rules else without_axes(spec, (EXPERTS,))
            for name, spec in specs.items()
        }
    if sizes.get(AXIS, 1) == 1:
        return specs, set()
    kept = checked_plan(model, sizes[AXIS], rules, replicate=replicate, codes=False)
    whole = expanded_plan(model, "tp_plan").keys() - kept.keys()
    dropped = whole - rules.keys()
    return {name: without_axes(spec, (AXIS,)) if name in dropped else spec for name, spec in specs.items()}, whole


def _annotate_outputs(model: nn.Module, mesh: Mesh, specs: Mapping[str, PartitionSpec]) -> list[Any]:
    """Hooks that annotate what layers and the head return, and its gradient.

    Without them the partitioner could keep a weight divided, and compute the rows of several devices on each: a head
    over dp=2,fsdp=2 took twice the FLOPs.
    """
    from easytorch.distributed.fully_sharded import fsdp_groups

    def annotating(layout_of: Callable[[Tensor], PartitionSpec]) -> Any:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if not isinstance(first, Tensor) or first.device.type != "xla" or first.dim() < 2:
                return
            spec = layout_of(first)
            mark(first, mesh, spec)
            if first.requires_grad and torch.is_grad_enabled():
                first.register_hook(lambda gradient: mark(gradient, mesh, spec))

        after.annotates_sharding = True  # type: ignore[attr-defined]  # `causal_loss.plain_parameters` reads it
        return after

    rows = data_axes(mesh)
    by_rows = annotating(lambda tensor: (entry(rows), *(None,) * (tensor.dim() - 1)))
    hooks = [module.register_forward_hook(by_rows) for module in fsdp_groups(model)]
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    table = getattr(head, "weight", None)
    for name in [name for name, one in model.named_parameters(remove_duplicate=False) if one is table][:1]:
        over = axis_names(specs[name][0])
        hooks.append(head.register_forward_hook(annotating(partial(_layout_of_logits, rows=rows, vocabulary=over))))
    return hooks


def _layout_of_logits(logits: Tensor, rows: tuple[str, ...], vocabulary: tuple[str, ...]) -> PartitionSpec:
    """The spec of logits (..., V) of a head whose weight is divided over `vocabulary`.

    An axis of both divides the rows, and the weight is gathered, or else the vocabulary, and the rows are gathered:
    whichever are fewer.
    """
    size = logits.shape[-1]
    by_rows = logits.numel() // max(size, 1) > size
    first = rows if by_rows else tuple(name for name in rows if name not in vocabulary)
    last = tuple(name for name in vocabulary if name not in first)
    return (entry(first), *(None,) * (logits.dim() - 2), entry(last))


def check_axes(sizes: Mapping[str, int]) -> None:
    """`NotImplementedError` for an axis that is not supported."""
    if others := [f"{name}={size}" for name, size in sizes.items() if name not in AXES and size > 1]:
        raise NotImplementedError(
            f"a mesh of torch_xla supports the axes {', '.join(AXES)}, and this one has {', '.join(others)}"
        )
