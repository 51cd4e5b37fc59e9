"""Data parallelism of a model in place: FSDP2 over the axis "fsdp", replicas of it over "dp" (HSDP)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard

from easytorch.distributed.declared import first_names, generic_name
from easytorch.distributed.gloo import use_direct_collectives
from easytorch.distributed.mesh import mesh_axis_sizes
from easytorch.distributed.specs import PartitionSpec, axis_names, uneven_dimension

AXIS = "fsdp"


def shard_fully(
    model: nn.Module,
    mesh: DeviceMesh,
    rules: Mapping[str, PartitionSpec],
    experts: Sequence[nn.Module] = (),
    mesh_of_experts: DeviceMesh | None = None,
) -> None:
    """Shard each parameter over "fsdp", on the dimension that a rule names or else the first.

    mesh: of "fsdp", of replicas and "fsdp", or of replicas alone. Layers are groups of their own, gathered for their
    forward and again for their backward; the rest is one group, which stays gathered in between.
    experts: modules that are divided over another axis, groups of their own over `mesh_of_experts`, None for one rank.
    """
    sizes = mesh_axis_sizes(mesh)
    dims = {one: Shard(dim) for one, dim in shard_dimensions(model, rules, sizes).items()}
    divided = {one for module in experts for one in module.parameters()}
    for module in experts:
        if mesh_of_experts is not None:
            _shard_group(module, mesh_of_experts, dims, set())
    for module in [*fsdp_groups(model), model]:
        if module not in experts:
            _shard_group(module, mesh, dims, divided)
    _leave_logits_deferred(model)


def shard_dimensions(model: nn.Module, rules: Mapping[str, PartitionSpec], sizes: Mapping[str, int]) -> dict[int, int]:
    """id of a parameter -> the dimension that is sharded over "fsdp"; `ValueError` for one that a rule names and that
    does not divide, and for two of one tied weight. FSDP2 pads the first dimension alone."""
    first, dims = first_names(model), dict[str, int]()
    for name, other in first.items():
        dim = next((dim for dim, axes in enumerate(rules.get(name, ())) if AXIS in axis_names(axes)), None)
        if dim is not None and dims.setdefault(other, dim) != dim:
            raise ValueError(f"{other} and {name} are one tied weight, and the partition rules shard them differently")
    for name in dims:
        parameter = model.get_parameter(name)
        spec = tuple(AXIS if index == dims[name] else None for index in range(parameter.ndim))
        if dims[name] and (why := uneven_dimension(parameter.shape, spec, sizes)) is not None:
            raise ValueError(f"{name}: {why}")
    parameters = model.named_parameters(remove_duplicate=False)
    return {id(parameter): dims.get(first[name], 0) for name, parameter in parameters}


def _shard_group(module: nn.Module, mesh: DeviceMesh, dims: Mapping[int, Shard], ignored: set[nn.Parameter]) -> None:
    """Make the parameters below `module` that are in no group yet one group; ignored: those that are to be in none."""
    if AXIS in (mesh.mesh_dim_names or ()):
        sharded = fully_shard(
            module, mesh=mesh, shard_placement_fn=lambda one: dims.get(id(one)), ignored_params=ignored
        )
        if mesh.device_type == "cpu":
            use_direct_collectives(sharded, mesh.get_group(AXIS))
        return
    from torch.distributed._composable.replicate_with_fsdp import replicate

    kind = type(module).__name__
    replicate(module, mesh=mesh, ignored_params=ignored)
    type(module).__name__ = f"FSDP{kind}"  # the prefix that transformers leaves out of a config's `architectures`


def _leave_logits_deferred(model: nn.Module) -> None:
    """Let FSDP2's hook of the model, which looks for the tensors of its output to see their backward pass begin, pass
    over logits that are computed when they are read (`left_deferred` of the output): training never reads them, and of
    a small model with a large vocabulary they took a tenth of a step. The loss and the layers begin that pass, before
    which those of an output that is still held are computed: after it the head's weight is a shard."""
    assert isinstance(model, FSDPModule)
    state = model._get_fsdp_state()
    number, hook = state._post_forward_hook_handle.id, state._post_forward

    def post_forward(module: nn.Module, given: Any, output: Any) -> Any:
        with getattr(output, "left_deferred", nullcontext)():
            output = hook(module, given, output)
        if not torch.compiler.is_compiling() and (compute := getattr(output, "compute_before_backward", None)):
            compute()  # after FSDP2's own hook of the loss, which has the weights there
        return output

    assert number in model._forward_hooks
    model._forward_hooks[number] = post_forward


def fsdp_groups(model: nn.Module) -> list[nn.Module]:
    """The modules that are gathered one at a time: those of the model's plan, else those that are not to be split."""
    plan = getattr(model, "fsdp_plan", None) or {}
    names = {name for name, style in plan.items() if style == "free_full_weight"}
    classes = set(getattr(model, "_no_split_modules", None) or ())
    tied = {id(one) for one in _tied(model)}
    found = [
        module
        for name, module in model.named_modules()
        if name and (generic_name(name) in names if names else type(module).__name__ in classes)
    ]
    # a weight that is used in two places stays gathered with the rest
    return [
        module
        for module in found
        if any(True for _ in module.parameters()) and not any(id(one) in tied for one in module.parameters())
    ]


def keep_gathered(model: nn.Module) -> None:
    """Keep what is gathered for a forward until its backward, for memory of the full weights; before the first one."""
    from torch.distributed._composable.replicate_with_fsdp import _get_module_replicate_state

    for module in model.modules():
        if isinstance(module, FSDPModule) and _get_module_replicate_state(module) is None:
            module.set_reshard_after_forward(False, recurse=False)


def undo(model: nn.Module) -> None:
    """Undo `shard_fully`, leaving the parameters as they are. torch has no function for it."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            state._pre_forward_hook_handle.remove()
            state._post_forward_hook_handle.remove()
            # behind those that fully_shard (2) and replicate (3) have put before it
            module.__class__ = type(module).__mro__[getattr(type(module), "_orig_cls_mro_index", 2)]
            for key in (STATE_KEY, REGISTRY_KEY):
                module.__dict__.pop(key, None)
            _module_state_mapping.pop(module, None)
        for key in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            module.__dict__.pop(key, None)


def _tied(model: nn.Module) -> list[nn.Parameter]:
    seen: dict[int, nn.Parameter] = {}
    tied = []
    for _, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in seen:
            tied.append(parameter)
        seen[id(parameter)] = parameter
    return tied
