"""The tensor parallel plan that a model declares, carried out over a mesh, and taken back.

The plans and what their styles do are transformers': `model.tp_plan`, module or parameter -> style.
"""

from __future__ import annotations

import importlib.util

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

AXIS = "tp"
_PARTIAL_GRADIENT = "replicated_with_grad_allreduce"
_APPLIED = "_applied_tp_plan"  # of the model: the modules whose forward is wrapped, and the hooks of gradients


def parallelize(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Shard the model over the mesh's axis "tp" by its plan. All ranks call it; rank 0's weights count."""
    ranks = _axis_of(mesh)
    size = ranks.size()
    if any(isinstance(one, DTensor) for one in model.parameters()):
        raise ValueError("the model is sharded already: gather_model undoes what shard_model did")
    if not model.tp_plan:
        raise NotImplementedError(f"{type(model).__name__} declares no tensor parallel plan: its tp_plan is empty")
    if importlib.util.find_spec("transformers.distributed.tensor_parallel") is None:
        raise NotImplementedError("sharding over a mesh needs a transformers with distributed.tensor_parallel (5.23)")
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plan = model._expand_parallel_plan(model.tp_plan)
    _check_sizes(model, plan, size)
    source = dist.get_global_rank(ranks.get_group(), 0)
    with torch.no_grad():
        for one in (*model.parameters(), *model.buffers()):
            if not one.is_meta:
                dist.broadcast(one, source, ranks.get_group())
    # transformers reduces what has accumulated: with several backward passes, the first ones' once more at each
    partial = [name for name, style in plan.items() if style == _PARTIAL_GRADIENT]
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    # a tied weight has one name of its two here, and is tied again below
    plan = {one: style for one, style in plan.items() if one not in partial and (one in modules or one in parameters)}
    apply_tensor_parallelism(model, ranks, plan)
    hooks = [
        _sum_gradients(parameter, ranks.get_group())
        for name in partial
        if name in modules
        for parameter in modules[name].parameters(recurse=False)
    ]
    model.tie_weights()
    # how transformers' caches know the heads of a rank
    model.__dict__.update(_tp_size=size, _device_mesh=ranks)
    setattr(model, _APPLIED, (tuple(name for name in plan if name in modules), hooks))


def undo(model: PreTrainedModel) -> None:
    """Take `parallelize` back, but for the parameters, which stay as they are."""
    names, hooks = model.__dict__.pop(_APPLIED, ((), ()))
    if not names:
        return
    modules = dict(model.named_modules())
    for name in names:
        for attribute in ("forward", "_is_hooked"):
            modules[name].__dict__.pop(attribute, None)
    for hook in hooks:
        hook.remove()
    model.__dict__.update(_tp_size=None, _device_mesh=None)


def _axis_of(mesh: DeviceMesh) -> DeviceMesh:
    names = mesh.mesh_dim_names or ()
    others = [f"{name}={size}" for name, size in zip(names, mesh.mesh.shape, strict=False) if name != AXIS and size > 1]
    if AXIS not in names or others:
        given = ", ".join(names) or "no names"
        raise NotImplementedError(
            f"shard_model carries out tensor parallelism alone, over a mesh with the axis {AXIS!r} and no other of "
            f"several devices, got {', '.join(others) or given}: shard a slice, mesh[{AXIS!r}], and the rest by "
            f"torch's fully_shard"
        )
    return mesh if mesh.ndim == 1 else mesh[AXIS]


def _check_sizes(model: PreTrainedModel, plan: dict[str, str], ranks: int) -> None:
    """Refuse what does not divide: heads, and the dimensions that are sharded."""
    config = model.config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % ranks:
            raise ValueError(f"{name}={heads} does not divide over {ranks} ranks: take a divisor of {heads}")
    for name, parameter in model.named_parameters():
        style = plan.get(name, "")
        dimension = -1 if "rowwise" in style and "embedding" not in style else 0
        if (name.endswith(".bias") and dimension == -1) or ("colwise" not in style and "rowwise" not in style):
            continue
        if parameter.shape[dimension] % ranks:
            given = parameter.shape[dimension]
            raise ValueError(
                f"{name} {tuple(parameter.shape)}: {given} does not divide over {ranks} ranks; "
                f"{given // ranks * ranks} or {(given // ranks + 1) * ranks} would"
            )


def _sum_gradients(parameter: torch.nn.Parameter, group: dist.ProcessGroup) -> RemovableHandle:
    """Each rank's gradient is that of its own heads: what is accumulated is the sum."""

    def total(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=group)
        return gradient

    handle: RemovableHandle = parameter.register_hook(total)
    return handle
