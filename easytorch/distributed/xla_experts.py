"""The experts of a model over a mesh of torch_xla: each device computes its own experts, for the tokens it is given.

XLA's partitioner would sort the tokens of all devices on each of them, and gather the arrays of a Pallas kernel, which
it cannot divide. So a module of experts runs in a manually sharded region, where tensors are a device's own parts. The
region is entered with the tokens of all devices of "ep" and the weights of the device's experts, and left with partial
sums of the results, which are added outside; the partitioner makes an all-gather and a reduce-scatter of the two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from easytorch.distributed.declared import Declared, declared_sharding
from easytorch.distributed.expert_parallel import divisible_experts
from easytorch.distributed.mesh import DATA, mesh_axis_sizes
from easytorch.distributed.specs import PartitionSpec, axis_names, entry, to_xla, without_axes
from easytorch.distributed.tensor_parallel import Read, read_through

if TYPE_CHECKING:
    from torch_xla.distributed.spmd import Mesh

EXPERTS, FEATURES = "ep", "tp"


def divide_experts(model: nn.Module, mesh: Mesh, whole: set[str], *, replicate: bool) -> list[str]:
    """Make the model's experts compute in regions of their own; returns the names of the modules.

    whole: modules that are not divided over "tp". replicate: where experts do not divide over "ep", each device has
    all of them; else they are an error.
    """
    sizes = mesh_axis_sizes(mesh)
    if not any(sizes.get(axis, 1) > 1 for axis in (*DATA, FEATURES)):
        return []
    found = divisible_experts(model, sizes.get(EXPERTS, 1), replicate=replicate)
    quantized = [name for name in found if hasattr(model.get_submodule(name), "stack_of_buffer")]
    if quantized and sizes.get(EXPERTS, 1) > 1:
        raise NotImplementedError(f"{quantized[0]}: quantized experts are not divided over ep of torch_xla's devices")
    found = {name: experts for name, experts in found.items() if name not in quantized}
    declared = declared_sharding(model)
    for name, experts in found.items():
        module: Any = model.get_submodule(name)
        own = {key: declared[f"{name}.{key}"] for key, _ in module.named_parameters(recurse=False)}
        # partial sums do not pass a norm, and each of them would have the bias
        together = name in whole or module.has_bias or module.has_post_expert_norm
        dropped = {FEATURES, EXPERTS} - sizes.keys() | ({FEATURES} if together else set())
        layouts = {key: Declared(without_axes(one.spec, dropped), one.parts) for key, one in own.items()}
        _divide(module, mesh, experts, layouts)
    return list(found)


def undo(model: nn.Module, names: list[str]) -> None:
    """Undo `divide_experts`."""
    for name in names:
        model.get_submodule(name).__dict__.pop("forward", None)


class _Region:
    """What enters and leaves a manually sharded region of a mesh."""

    def __init__(self, mesh: Mesh, axes: tuple[str, ...]) -> None:
        """axes: those over whose devices the computation is divided; over others they compute the same."""
        self.mesh, self.names, self.sizes = mesh, tuple(mesh.axis_names or ()), mesh_axis_sizes(mesh)
        self.axes = axes

    def part(self, tensor: Tensor, spec: PartitionSpec) -> Tensor:
        """The device's part of a tensor, by its spec; no gradient passes."""
        import torch_xla
        import torch_xla.distributed.spmd as xs

        # a node of its own, which can be annotated: the tensor itself may be divided otherwise
        copy = tensor + torch.zeros((), dtype=tensor.dtype, device=tensor.device)
        xs.mark_sharding(copy, self.mesh, to_xla(spec, self.names))
        return torch_xla._XLAC._spmd_full_to_shard_shape(copy)  # type: ignore[no-any-return]

    def full(self, part: Tensor, spec: PartitionSpec, partial_over: tuple[str, ...]) -> Tensor:
        """The sum over these axes of the devices' parts, as a tensor outside of the region; no gradient passes."""
        import torch_xla
        import torch_xla.distributed.spmd as xs

        spec = (entry(partial_over), *spec)
        part = xs.xla_sharding._mark_manual_sharding(part.unsqueeze(0)).global_tensor
        shape = [
            size * math.prod(self.sizes[name] for name in axis_names(axes))
            for size, axes in zip(part.shape, spec, strict=True)
        ]
        sharding = self.mesh.get_op_sharding(to_xla(spec, self.names))
        whole: Tensor = torch_xla._XLAC._spmd_shard_to_full_shape(part, sharding, shape, part.dtype)
        return whole.sum(0)

    def enter(self, tensor: Tensor, spec: PartitionSpec) -> Tensor:
        """`part`, whose gradient is the sum over the devices that have the same part."""
        return _Enter.apply(tensor, self, spec)  # type: ignore[no-any-return, no-untyped-call]

    def leave(self, part: Tensor, spec: PartitionSpec) -> Tensor:
        """`full`: the sum over the axes that the spec does not name."""
        return _Leave.apply(part, self, spec)  # type: ignore[no-any-return, no-untyped-call]

    def others(self, spec: PartitionSpec) -> tuple[str, ...]:
        """The axes of the computation that the spec does not name."""
        named = {name for axes in spec for name in axis_names(axes)}
        return tuple(name for name in self.axes if name not in named)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, region: _Region, spec: PartitionSpec) -> Tensor:
        ctx.region, ctx.spec = region, spec
        return region.part(tensor, spec)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        return ctx.region.full(gradients[0], ctx.spec, ctx.region.others(ctx.spec)), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, region: _Region, spec: PartitionSpec) -> Tensor:
        ctx.region, ctx.spec = region, spec
        return region.full(part, spec, region.others(spec))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        return ctx.region.part(gradients[0], ctx.spec), None, None


def _divide(module: Any, mesh: Mesh, experts: int, layouts: Mapping[str, Declared]) -> None:
    """Make the module's forward compute in a region of the mesh. experts: their number in all."""
    sizes, original = mesh_axis_sizes(mesh), module.forward
    named = {name for layout in layouts.values() for axes in layout.spec for name in axis_names(axes)}
    batch = tuple(name for name in sizes if name in DATA and name != EXPERTS)
    region = _Region(mesh, tuple(name for name in sizes if name in batch or name in named))
    own, rows = experts // sizes.get(EXPERTS, 1), entry(batch)
    shards = math.prod(sizes[name] for name in batch)

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states (N, D), top_k_index and top_k_weights (N, k) -> (N, D)."""
        if hidden_states.device.type != "xla" or hidden_states.shape[0] % shards:
            return original(hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]
        by_rows: PartitionSpec = (rows, None)
        first = torch.arange(0, experts, own, device=hidden_states.device)
        index = region.part(top_k_index, by_rows) - region.part(first, (EXPERTS if EXPERTS in sizes else None,))
        index = torch.where(index < 0, own, index)  # those of own or more are other devices'
        module.num_experts = own
        try:
            part = divided(region.enter(hidden_states, by_rows), index, region.enter(top_k_weights, by_rows))
        finally:
            module.num_experts = experts
        return region.leave(part, by_rows)

    # in the region, the parameters are the device's parts
    reads: dict[str, Read] = {key: partial(_own_part, region, layout) for key, layout in layouts.items()}
    inner: Any = _Call(module, original)
    read_through(inner, reads)
    divided = inner.forward
    module.forward = forward


class _Call:
    """A module's tensors and its own forward, for `read_through` to wrap in place of the module's."""

    def __init__(self, module: nn.Module, forward: Any) -> None:
        self._parameters, self._buffers, self.forward = module._parameters, module._buffers, forward


def _own_part(region: _Region, layout: Declared, parameter: Tensor) -> Tensor:
    """The device's part of a parameter; of several in one tensor, as gate and up projection, a part of each."""
    spec, parts = layout
    dim = next((index for index, axes in enumerate(spec) if axes == FEATURES), None)
    if dim is None or parts == 1:
        return region.enter(parameter, spec)
    split = parameter.unflatten(dim, (parts, -1))
    return region.enter(split, (*spec[:dim], None, *spec[dim:])).flatten(dim, dim + 1)
