"""`train_step`: forward, backward and the optimizer's update as one program, on one device or divided over a mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from easytorch import backends
from easytorch.backends.dtypes import dtype_of
from easytorch.backends.interface import Backend, Buffer, Executable
from easytorch.backends.partitioning import Mesh, Sharding, check_sharding, shard_slices
from easytorch.backends.shapes import Shape
from easytorch.distributed.mesh import parse_axes
from easytorch.distributed.rules import PartitionRules
from easytorch.frontend import optimizer_rules
from easytorch.frontend.lru import Bounded
from easytorch.frontend.rng import fresh_state, is_random
from easytorch.frontend.step_layout import layout_of
from easytorch.frontend.step_program import StepGraph, build, spec_of, state_shardings

if TYPE_CHECKING:
    from easytorch.backends.xla.aot import Facts


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    mesh: str | Mapping[str, int] | None = None,
    partition_rules: PartitionRules | None = None,
    uneven: str = "error",
    backend: str | Backend = "xla",
    loss: Callable[[Any], Tensor] | None = None,
    max_grad_norm: float | None = None,
    recompute: bool = False,
    autocast: torch.dtype | None = None,
) -> TrainStep:
    """A function of a batch that trains `model` by one step of `optimizer` and returns the loss.

    The whole step is one program. Over a mesh it is divided by the compiler (Shardy): batches by their rows over "dp",
    "fsdp" and "ep", weights and the optimizer's state as the model declares it over "tp" and "ep" and, over "fsdp",
    each by itself. The loss is that of the whole batch on every mesh.

    model, optimizer: torch's AdamW, Adam or SGD of the model's parameters; learning rates are read at each step. Their
        tensors stay as they are until `sync`.
    mesh: axes and sizes, "fsdp=2,tp=2"; -1 for the remaining devices of the backend. None is one device.
    partition_rules, uneven: as `easytorch.distributed.shard_model` takes them.
    backend: a configuration as of `backends.new`, or a backend; only "xla" takes a mesh.
    loss: of the model's output; by default its `loss`, or itself if it is a tensor.
    max_grad_norm: gradients are clipped to this norm of all of them, above 0; None leaves them.
    recompute: keep only the inputs of layers for the backward (transformers' gradient checkpointing).
    autocast: the dtype that matrix products compute in; parameters keep theirs.
    """
    optimizer_rules.check_optimizer(optimizer)
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm must be above 0, got {max_grad_norm}; None leaves gradients as they are")
    made = backends.new(backend) if isinstance(backend, str) else backend
    layout = None
    if mesh is not None:
        layout = layout_of(model, parse_axes(mesh, _devices_for(mesh, made)), partition_rules, uneven)
    spec = spec_of(
        model, optimizer, layout, loss=loss or loss_of, max_norm=max_grad_norm, recompute=recompute, autocast=autocast
    )
    return TrainStep(spec, made, layout)


class TrainStep:
    """A compiled step, called with a batch. `state_dict` and `sync` show what it has trained."""

    def __init__(self, spec: Any, backend: Backend, layout: Any) -> None:
        self.backend = backend
        self.grad_norm: Tensor | None = None
        self._spec, self._layout = spec, layout
        self._mesh = None if layout is None else Mesh.of(layout.axes)
        self._shardings = state_shardings(spec, layout)
        self._programs: Bounded[Any, tuple[StepGraph, Executable]] = Bounded()
        self._state: list[list[Buffer]] = []
        self.bind()

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of the batch, before the step that it takes. Arguments are those of the model's forward."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        _check_batch(leaves, structure)
        step, program = self._compiled(leaves, structure)
        self._steps += 1
        optimizer = self._spec.optimizer
        numbers = [optimizer_rules.numbers(optimizer, group, self._steps) for group in optimizer.param_groups]
        given = [torch.tensor(numbers, dtype=torch.float32), *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
        shards = [self._shards(one, sharding) for one, sharding in zip(given, [(), *step.batch], strict=True)]
        random = self._random_state() if is_random(program) else []
        inputs: list[Buffer] = []
        donate: list[bool] = []
        changed = set(step.changed)
        for device, state in enumerate(self._state):
            rest = [*(one[device] for one in shards), *random[device : device + 1]]
            inputs += [*state, *rest]
            donate += [place in changed for place in range(len(state))] + [False] * len(rest)
        outputs = program.execute(inputs, donate)
        count = len(step.changed) + 2
        for device, state in enumerate(self._state):
            for place, buffer in zip(step.changed, outputs[device * count :], strict=False):
                state[place] = buffer
        self.grad_norm = self.backend.buffer_to_torch(outputs[count - 1])
        return self.backend.buffer_to_torch(outputs[count - 2])

    def compile_for_tpu(self, topology: str, *args: Any, **kwargs: Any) -> Facts:
        """What the step for such a batch takes of each chip of a TPU: memory, operations, collectives.

        topology: "v5e:2x2", with as many chips as the mesh. libtpu compiles it, on any host; the process is started
        with `easytorch.kernels.interop.tpu_compile.ENVIRONMENT`.
        """
        from easytorch.backends.xla import aot, pjrt

        leaves, structure = pytree.tree_flatten((args, kwargs))
        _check_batch(leaves, structure)
        step = build(self._spec, self.backend, self._layout, leaves, structure, leaf_names(structure))
        return aot.compile_for(step.finish(), pjrt.tpu_devices(topology), step.changed)

    def bind(self) -> None:
        """Copies the model's tensors and the optimizer's state to the devices, in place of what was trained."""
        spec = self._spec
        self._steps = optimizer_rules.count_of(spec.optimizer)
        tensors = [*spec.trained.values(), *map(self._slot, spec.slots), *spec.fixed.values()]
        by_tensor = [self._shards(one, how) for one, how in zip(tensors, self._shardings, strict=True)]
        self._state = [list(one) for one in zip(*by_tensor, strict=True)]

    def state_dict(self) -> dict[str, Tensor]:
        """The model's state dict with the values that were trained, on the CPU."""
        state = dict(self._spec.model.state_dict(keep_vars=True))
        held = {id(one): place for place, one in self._tensors()}
        return {
            name: self._full(held[id(one)]) if id(one) in held else one.detach().cpu() for name, one in state.items()
        }

    @torch.no_grad()
    def sync(self) -> None:
        """Copies the values that were trained into the model, and the optimizer's state into the optimizer."""
        spec = self._spec
        for place, one in self._tensors():
            one.copy_(self._full(place))
        for place, (name, slot) in enumerate(spec.slots, len(spec.trained)):
            if self._steps:
                spec.optimizer.state[spec.trained[name]][slot] = self._full(place).to(spec.trained[name].device)
        if not isinstance(spec.optimizer, torch.optim.SGD) and self._steps:
            for parameter in spec.trained.values():
                spec.optimizer.state[parameter]["step"] = torch.tensor(float(self._steps))

    def _tensors(self) -> list[tuple[int, Tensor]]:
        """The model's tensors by their place in the state."""
        spec = self._spec
        fixed = enumerate(spec.fixed.values(), len(spec.trained) + len(spec.slots))
        return [*enumerate(spec.trained.values()), *fixed]

    def _slot(self, key: tuple[str, str]) -> Tensor:
        name, slot = key
        parameter: Tensor = self._spec.trained[name]
        kept = self._spec.optimizer.state.get(parameter, {}).get(slot)
        return torch.zeros_like(parameter) if kept is None else kept

    def _compiled(self, leaves: Sequence[Any], structure: pytree.TreeSpec) -> tuple[StepGraph, Executable]:
        settings = [
            {name: value for name, value in group.items() if name not in ("params", "lr", "initial_lr")}
            for group in self._spec.optimizer.param_groups
        ]
        sizes = tuple((one.shape, one.dtype) if isinstance(one, Tensor) else one for one in leaves)
        key = (structure, sizes, repr(settings), self._spec.model.training)
        found = self._programs.get(key)
        if found is None:
            step = build(self._spec, self.backend, self._layout, leaves, structure, leaf_names(structure))
            program = step.builder.compile(*step.outputs, shardings=step.shardings)
            found = self._programs.put(key, (step, program))
        return found

    def _shards(self, tensor: Tensor, sharding: Sharding) -> list[Buffer]:
        """Each device's part, in memory of its own: programs donate it."""
        source = tensor.detach()
        if self._mesh is None:
            return [self.backend.buffer_from_torch(source.clone(memory_format=torch.contiguous_format))]
        whole = Shape(dtype_of(source.dtype), tuple(source.shape))
        parts = shard_slices(source.shape, check_sharding(sharding, whole, self._mesh, "tensor"), self._mesh)
        return [
            self.backend.buffer_from_torch(source[part].clone(memory_format=torch.contiguous_format), device)
            for device, part in enumerate(parts)
        ]

    def _full(self, place: int) -> Tensor:
        """A tensor of the state, put together from the devices' parts."""
        parts = [self.backend.buffer_to_torch(state[place]) for state in self._state]
        if self._mesh is None:
            return parts[0].clone()
        mesh, given = self._mesh, self._shardings[place]
        sharding = (*given, *(None,) * (parts[0].dim() - len(given)))
        sizes = [size * mesh.parts(entry) for size, entry in zip(parts[0].shape, sharding, strict=True)]
        full = torch.empty(sizes, dtype=parts[0].dtype)
        for part, slices in zip(parts, shard_slices(sizes, sharding, mesh), strict=True):
            full[slices] = part
        return full

    def _random_state(self) -> list[Buffer]:
        state = self.backend.buffer_to_numpy(fresh_state(self.backend))
        return [self.backend.buffer_from_numpy(np.array(state), device) for device in range(len(self._state))]


def loss_of(output: Any) -> Tensor:
    """The loss of a model's output; `TypeError` where it has none."""
    found = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if not isinstance(found, Tensor):
        raise TypeError(
            f"{type(output).__name__} has no loss; pass labels in the batch, or loss= a function of the model's output"
        )
    return found


def _check_batch(leaves: Sequence[Any], structure: pytree.TreeSpec) -> None:
    """`TypeError` for arrays that are no tensors, which would be constants of the program, `ValueError` for a batch
    without rows, whose mean loss is NaN."""
    for name, leaf in zip(leaf_names(structure), leaves, strict=True):
        if not isinstance(leaf, Tensor):
            if hasattr(leaf, "__array__"):
                kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
                raise TypeError(f"{name} of a batch is a {kind}: a train step takes tensors, as torch.as_tensor makes")
        elif leaf.dim() and not leaf.numel():
            raise ValueError(f"{name} of a batch is empty, of the shape {tuple(leaf.shape)}: give at least one row")


def leaf_names(structure: pytree.TreeSpec) -> list[str]:
    """The leaves of (args, kwargs) by name, for messages."""
    paths, _ = pytree.tree_flatten_with_path(
        pytree.tree_unflatten([0] * structure.num_leaves, structure), is_leaf=lambda leaf: False
    )
    return [pytree.keystr(path) for path, _ in paths]


def _devices_for(mesh: str | Mapping[str, int], backend: Backend) -> int:
    """The devices that the mesh's sizes make up; all of the backend where one of them is -1, or is no size."""
    text = mesh if isinstance(mesh, str) else ",".join(f"{name}={size}" for name, size in mesh.items())
    sizes = [part.partition("=")[2].strip() for part in text.split(",") if part.strip()]
    if not all(size.isdecimal() and int(size) for size in sizes):
        return backend.num_devices()
    return math.prod(map(int, sizes))
