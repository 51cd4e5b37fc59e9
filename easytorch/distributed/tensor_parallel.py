"""The tensor parallel plan that a model declares, applied over a mesh axis, and undone.

The styles of a plan are transformers', and wrap the forward of modules. A rule may shard a stored weight differently
from its style: it is redistributed where it is read.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from easytorch.distributed.declared import by_style, coded_weights, expanded_plan, first_names
from easytorch.distributed.specs import PartitionSpec, axis_names, uneven_dimension

AXIS = "tp"
_PROJECT_KEYS = ("k_proj", "qkv_proj", "query_key_value")  # transformers' get_kv_heads_per_rank knows these
_PARTIAL_GRADIENT = "replicated_with_grad_allreduce"
_APPLIED = "_applied_tp_plan"  # of the model: the modules whose forward is wrapped

Read = Callable[[Tensor], Tensor]


def parallelize(model: nn.Module, ranks: DeviceMesh, rules: Mapping[str, PartitionSpec], *, replicate: bool) -> None:
    """Shard the model, or one stage of it, over the mesh of the one axis "tp" by its plan. All ranks call it, with
    equal weights, after `check_sharding` of the whole model.

    rules: parameter -> the spec it is stored with instead of that of its style. replicate: modules whose sizes do not
    divide are replicated on every rank; else they are an error.
    """
    if importlib.util.find_spec("transformers.distributed.tensor_parallel") is None:
        raise NotImplementedError("sharding over a mesh needs a transformers with distributed.tensor_parallel (5.23)")
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    size = ranks.size()
    stored = stored_dimensions(model, rules)
    plan = dividing_plan(model, expanded_plan(model, "tp_plan"), stored, size, replicate)
    if replicate:
        stored = {
            name: None if _uneven(name, model.get_parameter(name).shape, dim, 1, size) else dim
            for name, dim in stored.items()
        }
    # by the names that the model's modules and parameters have: a tied weight has one of its two
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    reads: dict[str, dict[str, Read]] = {}
    _store(model, ranks, plan, stored, reads)
    coded = _divide_codes(model, ranks, plan)
    for name, style in plan.items():
        if style == _PARTIAL_GRADIENT and name in modules:
            # transformers reduces the accumulated gradient: a second backward pass would reduce that of the first again
            for key, _ in modules[name].named_parameters(recurse=False):
                reads.setdefault(name, {})[key] = _summing_gradient(ranks.get_group())
    styles = {
        name: style
        for name, style in plan.items()
        if style != _PARTIAL_GRADIENT
        and (name in modules or (name in parameters and not isinstance(model.get_parameter(name), DTensor)))
    }
    apply_tensor_parallelism(model, ranks, styles)
    for name, of_module in reads.items():
        read_through(modules[name], of_module)
    tie: Any = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()
    # how transformers' caches know the heads of a rank
    model.__dict__.update(_tp_size=size, _device_mesh=ranks)
    model.__dict__[_APPLIED] = tuple(dict.fromkeys([*(name for name in styles if name in modules), *reads, *coded]))


def undo(model: nn.Module) -> None:
    """Undo `parallelize`, leaving the parameters as they are."""
    names = model.__dict__.pop(_APPLIED, ())
    if not names:
        return
    modules = dict(model.named_modules())
    for name in names:
        for attribute in ("forward", "_is_hooked"):
            modules[name].__dict__.pop(attribute, None)
    model.__dict__.update(_tp_size=None, _device_mesh=None)


def stored_dimensions(model: nn.Module, rules: Mapping[str, PartitionSpec]) -> dict[str, int | None]:
    """Parameter -> the dimension that its rule shards over the axis; both names of a tied weight, which must agree."""
    found = {
        name: next((dim for dim, axes in enumerate(spec) if AXIS in axis_names(axes)), None)
        for name, spec in rules.items()
    }
    for name, other in first_names(model).items():
        if name in found and found.setdefault(other, found[name]) != found[name]:
            raise ValueError(f"{other} and {name} are one tied weight, and the partition rules shard them differently")
        if other in found:
            found[name] = found[other]
    return found


def _store(
    model: nn.Module,
    ranks: DeviceMesh,
    plan: Mapping[str, str],
    stored: Mapping[str, int | None],
    reads: dict[str, dict[str, Read]],
) -> None:
    """Shard the parameters that a rule stores otherwise than their style, and note in `reads` how they are read."""
    done: dict[int, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if name not in stored:
            continue
        computed, parts = by_style(plan.get(name), parameter.ndim)
        dim = stored[name]
        if dim == computed and (dim is None or parts == 1):
            continue
        module, _, key = name.rpartition(".")
        if id(parameter) not in done:
            placement = Replicate() if dim is None else Shard(dim)
            shard = distribute_tensor(parameter.detach(), ranks, [placement], src_data_rank=None)
            done[id(parameter)] = nn.Parameter(shard, requires_grad=parameter.requires_grad)
        model.get_submodule(module)._parameters[key] = done[id(parameter)]
        wanted: Placement = Replicate()
        if computed is not None:
            wanted = Shard(computed) if parts == 1 else _StridedShard(computed, split_factor=parts)
        # a module without a style computes with plain tensors, the same on each rank
        plain = name not in plan and module not in plan
        reads.setdefault(module, {})[key] = _redistributing(wanted, plain=plain)


def _divide_codes(model: nn.Module, ranks: DeviceMesh, plan: Mapping[str, str]) -> list[str]:
    """Divide weights in few bits as the plan divides their weights; the modules that have them, by name."""
    divided = []
    for name, module in list(model.named_modules()):
        shapes, reads = dict[str, tuple[int, ...]](), dict[str, Read]()
        for weight, coded in coded_weights(module).items():
            dim, parts = by_style(plan.get(f"{name}.{weight}"), len(coded.shape))
            if dim is None:
                continue
            own = list(coded.shape)
            own[dim] //= ranks.size()
            shapes[weight] = tuple(own)
            for key, dims in coded.buffers.items():
                along = dims[dim]
                if along is None:
                    continue
                placement: Placement = Shard(along) if parts == 1 else _StridedShard(along, split_factor=parts)
                full = module._buffers[key]
                assert full is not None
                module._buffers[key] = distribute_tensor(full, ranks, [placement], src_data_rank=None)
                reads[key] = own_part
        if shapes:
            _with_shapes(module, shapes)
            read_through(module, reads)
            divided.append(name)
    return divided


def _with_shapes(module: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
    forward = module.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        with module.with_shapes(shapes):
            return forward(*args, **kwargs)

    module.forward = call


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


def _redistributing(wanted: Placement, *, plain: bool) -> Read:
    def read(parameter: Tensor) -> Tensor:
        found = parameter.redistribute(placements=[wanted])  # type: ignore[attr-defined]
        result: Tensor = found.to_local(grad_placements=[wanted]) if plain else found
        return result

    return read


def _summing_gradient(group: dist.ProcessGroup) -> Read:
    def read(parameter: Tensor) -> Tensor:
        result: Tensor = _SumOfGradients.apply(parameter, group)  # type: ignore[no-untyped-call]
        return result

    return read


class _SumOfGradients(torch.autograd.Function):
    """The tensor itself; its gradient is that of the rank's own heads, and the sum of them is returned."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        total = gradients[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def read_through(module: nn.Module, reads: Mapping[str, Read]) -> None:
    """Make the module's forward see its parameters, and buffers, through `reads`."""
    forward = module.forward
    tensors: list[Any] = [module._parameters, module._buffers]
    places = [(own, name, read) for name, read in reads.items() for own in tensors if name in own]

    def call(*args: Any, **kwargs: Any) -> Any:
        kept = [(own, name, own[name]) for own, name, _ in places]
        try:
            for own, name, read in places:
                own[name] = read(own[name])
            return forward(*args, **kwargs)
        finally:
            for own, name, one in kept:
                own[name] = one

    module.forward = call


def checked_plan(
    model: nn.Module, size: int, rules: Mapping[str, PartitionSpec], *, replicate: bool, codes: bool = True
) -> dict[str, str]:
    """`dividing_plan` of what the model declares; `NotImplementedError` where nothing is to be sharded by it or by
    rules. codes: weights in few bits are divided too."""
    plan, stored = expanded_plan(model, "tp_plan"), stored_dimensions(model, rules)
    if not codes:
        left = _coded(model)
        plan = {name: style for name, style in plan.items() if name not in left}
    if not plan and not any(dim is not None for dim in stored.values()):
        raise NotImplementedError(
            f"{type(model).__name__} declares no tensor parallel plan: its tp_plan is empty; give partition_rules"
        )
    names = {name for name, _ in model.named_modules()}
    if adapted := next((name for name in plan if f"{name}.base_layer" in names), None):
        raise NotImplementedError(
            f"{adapted} has an adapter, which is not divided over tp: merge it (unwrap_lora_to_layers), or shard the "
            "model over dp and fsdp"
        )
    return dividing_plan(model, plan, stored, size, replicate, codes=codes)


def dividing_plan(
    model: nn.Module, plan: dict[str, str], stored: Mapping[str, int | None], size: int, replicate: bool,
    *, codes: bool = True,
) -> dict[str, str]:  # fmt: skip
    """The plan without the modules whose sizes do not divide over the ranks, which are an error without `replicate`."""
    dropped: set[str] = set()
    block_of, coded = _blocks(model), _coded(model) if codes else {}
    shapes = {name: tuple(one.shape) for name, one in model.named_parameters(remove_duplicate=False)}
    for name, shape in (shapes | {name: one.shape for name, one in coded.items()}).items():
        block = block_of[name]
        dim, parts = by_style(plan.get(name), len(shape))
        why = _heads(model, block, plan, size) or _uneven(name, shape, dim, parts, size)
        if why is None and name in coded and dim == coded[name].columns:
            why = _splits_groups(name, coded[name], size)
        if why is None and not replicate:
            why = _uneven(name, shape, stored.get(name), 1, size)
        if why is not None and not replicate:
            raise ValueError(f"{why}; uneven='replicate' replicates it on every rank")
        if why is not None:
            dropped.add(block)
    return {name: style for name, style in plan.items() if block_of[name] not in dropped}


def _blocks(model: nn.Module) -> dict[str, str]:
    """Module or parameter -> the module whose layers exchange shards: an attention, a feed-forward network, the stacked
    experts, or an embedding or head alone."""
    found = {}
    for name, module in model.named_modules():
        shapes = {key: one.shape for key, one in module.named_parameters(recurse=False)}
        shapes |= {key: one.shape for key, one in coded_weights(module).items()}
        own = [f"{name}.{key}" if name else key for key in shapes]
        alone = isinstance(module, nn.Embedding) or "." not in name or any(True for _ in module.children())
        stacked = any(len(shape) > 2 for shape in shapes.values())
        block = name if alone or stacked else name.rpartition(".")[0]
        found.update(dict.fromkeys([name, *own], block))
    for name, _ in model.named_parameters(remove_duplicate=False):  # a tied weight's other names
        found.setdefault(name, name.rpartition(".")[0])
    return found


def _heads(model: nn.Module, block: str, plan: Mapping[str, str], size: int) -> str | None:
    """Why an attention's heads cannot be sharded; None where they can."""
    if not any(plan.get(f"{block}.{name}") == "colwise" for name in _PROJECT_KEYS):
        return None
    config: Any = model.config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % size:
            return f"{name}={heads} does not divide over {size} ranks: take a divisor of {heads}"
    return None


def _coded(model: nn.Module) -> dict[str, Any]:
    """Name -> the `CodedWeight` of each weight in few bits."""
    modules = model.named_modules()
    return {f"{name}.{weight}": one for name, module in modules for weight, one in coded_weights(module).items()}


def _splits_groups(name: str, coded: Any, size: int) -> str | None:
    """Why codes cannot be sharded by columns; None where they can."""
    columns, unit = coded.shape[coded.columns], coded.unit
    if columns % (size * unit) == 0:
        return None
    fit = [str(one) for one in range(1, columns // unit + 1) if columns % (one * unit) == 0]
    sizes = f"take one of {', '.join(fit)}" if fit else "none does"
    return (
        f"{name}: its {columns} columns do not divide over {size} ranks by the {unit} that share a scale or a byte: "
        f"{sizes}"
    )


def _uneven(name: str, given: Sequence[int], dim: int | None, parts: int, size: int) -> str | None:
    """Why a parameter of that shape cannot be sharded on this dimension, with the sizes that could be; None where it
    can."""
    if dim is None:
        return None
    shape = list(given)
    if shape[dim] % parts == 0:
        shape[dim] //= parts
    spec = tuple(AXIS if index == dim else None for index in range(len(shape)))
    why = uneven_dimension(shape, spec, {AXIS: size})
    return None if why is None else f"{name}: {why}"
