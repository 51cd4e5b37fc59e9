"""Expert parallelism in place: the stacked experts of each layer are divided over the axis "ep", and tokens travel to
their experts and back by all-to-all.

The modules are those that a model's `ep_plan` names, ours and transformers' alike: experts(hidden_states, top_k_index,
top_k_weights) with stacked weights (E, ...), or the codes of quantized ones. Each rank has a batch of its own, whatever
the number of its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from easytorch.distributed.declared import DISPATCHED, STACKED, expanded_plan, generic_name
from easytorch.distributed.specs import PartitionSpec, axis_names
from easytorch.distributed.tensor_parallel import Read, own_part, read_through
from easytorch.kernels.grouped_matmul.routing import combine_experts, rows_of_experts, sort_by_expert

AXIS = "ep"
_APPLIED = "_applied_ep_plan"  # of the model: name of the experts -> their number in the whole model


def parallelize_experts(
    model: nn.Module, mesh: DeviceMesh, rules: Mapping[str, PartitionSpec], *, replicate: bool
) -> list[nn.Module]:
    """Divide the experts of each layer over the axis "ep" of `mesh`; all ranks call it, after tensor parallelism, and
    after `check_sharding` of the whole model, of which one stage may have no experts.

    Returns the modules of experts. replicate: where their number does not divide, they are replicated; else it is an
    error. rules: parameter -> the spec that a partition rule gives it, which has to shard experts by expert.
    """
    size = mesh[AXIS].size() if mesh.ndim > 1 else mesh.size()
    applied = _dividing_experts(model, size, rules, replicate=replicate)
    found = {name: model.get_submodule(name) for name in applied}
    for name, experts in applied.items():
        _divide(found[name], mesh, experts, size)
    model.__dict__[_APPLIED] = applied
    return list(found.values())


def check_experts(model: nn.Module, size: int, rules: Mapping[str, PartitionSpec], *, replicate: bool) -> None:
    """`NotImplementedError` for a model without experts, or whose experts cannot be divided, `ValueError` for a number
    of them or a rule that does not go with `size` ranks."""
    if DISPATCHED not in expanded_plan(model, "ep_plan").values():
        raise NotImplementedError(f"{type(model).__name__} declares no expert parallel plan: its ep_plan is empty")
    _dividing_experts(model, size, rules, replicate=replicate)


def _dividing_experts(
    model: nn.Module, size: int, rules: Mapping[str, PartitionSpec], *, replicate: bool
) -> dict[str, int]:
    """Module of experts -> their number, of those that divide over the ranks; the others are an error without
    `replicate`."""
    applied = divisible_experts(model, size, replicate=replicate)
    stored = {f"{name}.{key}" for name in applied for key in model.get_submodule(name)._parameters}
    _check_rules(rules, stored)
    return applied


def undo(model: nn.Module) -> None:
    """Undo `parallelize_experts`, leaving the parameters as they are."""
    for name, experts in model.__dict__.pop(_APPLIED, {}).items():
        module: Any = model.get_submodule(name)
        module.__dict__.pop("forward", None)
        module.num_experts = experts


def divisible_experts(model: Any, size: int, *, replicate: bool) -> dict[str, int]:
    """Module of experts -> the number of its experts, of those that divide over the `size` devices of "ep".

    replicate: those that do not divide are left out; else they are a `ValueError`. Experts that are not stacked, and
    cannot be divided, are a `NotImplementedError`, and left out for one device.
    """
    plan = expanded_plan(model, "ep_plan")
    modules = dict(model.named_modules())
    found = {name: modules[name] for name, style in plan.items() if style == DISPATCHED and name in modules}
    divisible = {}
    for name, module in found.items():
        experts: Any = getattr(module, "num_experts", None)
        if (why := _why_not_stacked(name, module, model.ep_plan, experts)) is not None:
            if size > 1:
                raise NotImplementedError(why)
        elif experts % size == 0:
            divisible[name] = experts
        elif not replicate:
            fit = ", ".join(str(one) for one in range(1, experts + 1) if experts % one == 0)
            raise ValueError(
                f"{name}: {experts} experts do not divide over ep={size} ranks: take one of {fit}; "
                f"uneven='replicate' replicates them on every rank"
            )
    return divisible


def _why_not_stacked(name: str, module: nn.Module, plan: Mapping[str, str], experts: Any) -> str | None:
    """The reason why the first dimension of each parameter is not that of the experts; None where it is."""
    own, generic = _stored(module), generic_name(name)
    whole = [key for key, (known, one) in own.items() if not _is_stack(plan.get(f"{generic}.{known}"), one, experts)]
    if own and not whole:
        return None
    return (
        f"{name} ({type(module).__name__}) has no stacked experts that can be divided over ep: "
        f"{', '.join(whole) or 'it has no parameters'}"
    )


def _is_stack(style: str | None, tensor: Tensor, experts: Any) -> bool:
    return style == STACKED and tensor.shape[0] == experts


def _stored(module: nn.Module) -> dict[str, tuple[str, Tensor]]:
    """Name of a tensor of experts -> (its name in plans, the tensor): parameters, and the codes of quantized stacks."""
    stored: dict[str, tuple[str, Tensor]] = {name: (name, one) for name, one in module.named_parameters()}
    if (stack_of_buffer := getattr(module, "stack_of_buffer", None)) is not None:
        stored |= {buffer: (name, module.get_buffer(buffer)) for buffer, name in stack_of_buffer().items()}
    return stored


def _check_rules(rules: Mapping[str, PartitionSpec], stored: set[str]) -> None:
    for name, spec in rules.items():
        dims = [index for index, axes in enumerate(spec) if AXIS in axis_names(axes)]
        if name in stored and (dims != [0] or "tp" in axis_names(spec[0])):
            raise ValueError(f"a partition rule gives {name} the spec {spec}: its experts, dimension 0, are over ep")
        if name not in stored and dims:
            raise ValueError(f"a partition rule shards {name} over ep, which divides the experts alone")


def _divide(module: Any, mesh: DeviceMesh, experts: int, size: int) -> None:
    ranks = mesh[AXIS] if mesh.ndim > 1 else mesh
    reads: dict[str, Read] = {}
    for key, (_, tensor) in _stored(module).items():
        tensor_parallel = tensor if isinstance(tensor, DTensor) else None
        local = tensor if tensor_parallel is None else tensor_parallel.to_local()
        part = local.detach().chunk(size)[ranks.get_local_rank()].clone()
        shard = DTensor.from_local(
            part,
            ranks if tensor_parallel is None else mesh[AXIS, "tp"],
            [Shard(0)] if tensor_parallel is None else [Shard(0), *tensor_parallel.placements],
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
        if key in module._parameters:
            module._parameters[key] = nn.Parameter(shard, requires_grad=tensor.requires_grad)
            reads[key] = _own_experts(tensor_parallel, 1.0 / size)
        else:
            module._buffers[key] = shard
            reads[key] = own_part
    module.num_experts = experts // size
    read_through(module, reads)
    _dispatch(module, ranks.get_group(), size)


def _own_experts(tensor_parallel: DTensor | None, factor: float) -> Read:
    """Reads the rank's own experts of a parameter, sharded over "tp" as they are without "ep".

    The tokens of all ranks' batches meet here, so that the gradient is the sum over the ranks, and the rest of the
    model gets the mean: factor is what makes it one.
    """

    def read(parameter: Tensor) -> Tensor:
        local: Tensor = _Scaled.apply(own_part(parameter), factor)  # type: ignore[no-untyped-call]
        if tensor_parallel is None:
            return local
        shape = torch.Size((local.shape[0], *parameter.shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        placed: Tensor = DTensor.from_local(
            local, tensor_parallel.device_mesh, tensor_parallel.placements, run_check=False, shape=shape, stride=stride
        )
        return placed

    return read


def _dispatch(module: Any, group: dist.ProcessGroup, size: int) -> None:
    """Make the module's forward take the rank's tokens and indices of all experts."""
    own_experts, scales_inputs = module.forward, getattr(module, "scales_inputs", False)

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states (N, D), top_k_index and top_k_weights (N, k) -> (N, D)."""
        order, counts = sort_by_expert(top_k_index, module.num_experts * size)
        rows = rows_of_experts(hidden_states, order, top_k_index.shape[1])
        if scales_inputs:
            rows = rows * top_k_weights.reshape(-1)[order][:, None].to(rows.dtype)
            top_k_weights = torch.ones_like(top_k_weights)
        sent = counts.view(size, module.num_experts)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        to_send, to_receive = torch.stack([sent.sum(1), received.sum(1)]).tolist()
        rows = _exchange(rows, to_send, to_receive, group)
        expert = torch.arange(module.num_experts, device=rows.device).repeat(size)
        expert = expert.repeat_interleave(received.reshape(-1), output_size=len(rows))[:, None]
        if len(rows):
            rows = own_experts(rows, expert, torch.ones_like(expert, dtype=rows.dtype))
        else:
            # a row of zeros: the weights have a gradient all the same, which other ranks may wait to reduce
            one = rows.sum(0, keepdim=True)
            rows = own_experts(one, expert.new_zeros(1, 1), torch.ones_like(one[:, :1]))[:0]
        rows = _exchange(rows.to(hidden_states.dtype), to_receive, to_send, group)
        return combine_experts(rows, order, top_k_weights).to(hidden_states.dtype)

    module.forward = forward


def _exchange(rows: Tensor, to_send: list[int], to_receive: list[int], group: dist.ProcessGroup) -> Tensor:
    """rows (sum(to_send), D), the first of them for rank 0 -> (sum(to_receive), D), the first of them from rank 0."""
    exchanged: Tensor = _AllToAll.apply(rows, to_send, to_receive, group)  # type: ignore[no-untyped-call]
    return exchanged


class _AllToAll(torch.autograd.Function):
    """Its gradient travels the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, to_send: list[int], to_receive: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.back = to_receive, to_send, group
        received = rows.new_empty(sum(to_receive), rows.shape[1])
        dist.all_to_all_single(received, rows.contiguous(), to_receive, to_send, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None]:
        return _exchange(gradients[0], *ctx.back), None, None, None


class _Scaled(torch.autograd.Function):
    """The tensor itself, whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None
