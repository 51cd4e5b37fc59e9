"""`compile`: a torch module as a program of a backend, called as the module is."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, SymIntArgument, TensorArgument
from torch.utils import _pytree as pytree

from easytorch import backends
from easytorch.backends.dtypes import dtype_of
from easytorch.backends.graph import Op
from easytorch.backends.interface import Backend, Buffer, Executable
from easytorch.backends.shapes import Shape
from easytorch.frontend.capture import capture, tensor_of
from easytorch.frontend.errors import LoweringError
from easytorch.frontend.lower import lower_graph
from easytorch.frontend.lru import Bounded
from easytorch.frontend.ranges import check_sizes
from easytorch.frontend.rng import fresh_state, is_random
from easytorch.frontend.routing import open_choice, routed
from easytorch.frontend.versions import version_of

_BACKENDS: dict[str, Backend] = {}
_STATE_MUTATIONS = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION)


def compile(
    module: torch.nn.Module,
    example_inputs: Any,
    dynamic_shapes: Any = None,
    backend: str | Backend | None = "xla",
    *,
    example_kwargs: Mapping[str, Any] | None = None,
) -> CompiledModule:
    """`module`, as it is for inputs like these, compiled for `backend` and called as the module is.

    example_inputs: a tuple of the positional arguments; a dict of arguments by name; or one tensor.
    example_kwargs: arguments by name, besides positional ones.
    dynamic_shapes: `torch.export`'s; each new set of sizes is compiled when it is first met.
    backend: a configuration as of `backends.new`, or a backend. "xla" leaves the platform open: on a CPU modules that
        multiply in bfloat16 or float16 run on "torch" then (routing.py).

    The program computes the forward; its outputs have no gradients.
    """
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(example_inputs, Mapping):
        kwargs.update(example_inputs)
    else:
        args = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else tuple(example_inputs)
    kwargs.update(example_kwargs or {})
    program = capture(module, args, kwargs, dynamic_shapes)
    chosen = backend_of(backend)
    if open_choice(backend):
        chosen = backend_of(routed(program.graph_module, chosen))
    compiled = CompiledModule(module, program, chosen)
    compiled.prepare(*args, **kwargs)
    return compiled


def backend_of(backend: str | Backend | None) -> Backend:
    """The backend itself; one of each configuration is made and kept."""
    if isinstance(backend, Backend):
        return backend
    key = backend or ""
    if key not in _BACKENDS or _BACKENDS[key].is_finalized():
        _BACKENDS[key] = backends.new(backend)
    return _BACKENDS[key]


@dataclass
class Plan:
    """The program for one set of sizes. `results` says of each output of the graph where it is found: the position
    among the executable's outputs, or the value itself, if it is known beforehand."""

    executable: Executable | None
    results: list[tuple[int | None, Any]]
    random: bool
    donate: list[bool] | None


class CompiledModule:
    """A module on a backend. Its parameters and buffers are put on the device once, and again when they were written to
    from outside; buffers that the forward writes to stay on the device, and are seen by `state_dict` and, after `sync`,
    in the module."""

    def __init__(self, module: torch.nn.Module, program: ExportedProgram, backend: Backend) -> None:
        self.module = module
        self.program = program
        self.backend = backend
        signature = program.graph_signature
        self._inputs = signature.input_specs
        self._outputs = signature.output_specs
        in_spec, out_spec = program.call_spec.in_spec, program.call_spec.out_spec
        assert in_spec is not None and out_spec is not None
        self._in_spec, self._out_spec = in_spec, out_spec
        by_position, by_name = in_spec.child(0), in_spec.child(1)
        self._positional = by_position.num_children
        self._names: list[str] = list(by_name.context or [])
        self._user = [spec for spec in self._inputs if spec.kind is InputKind.USER_INPUT]
        # Arguments that are all tensors, by position, are their own leaves.
        self._plain = not self._names and by_position.num_leaves == by_position.num_children == len(self._user)
        self._places = {spec.arg.name: place for place, spec in enumerate(self._user)}
        mutated = {spec.target for spec in self._outputs if spec.kind in _STATE_MUTATIONS}
        held = [
            str(spec.target)
            for spec in self._inputs
            if spec.kind is not InputKind.USER_INPUT and isinstance(spec.arg, TensorArgument)
        ]
        # Where each parameter and buffer is among those on the device.
        self._state = {name: place for place, name in enumerate(held)}
        self._mutated = sorted(name for name in held if name in mutated)
        self._tensors = [tensor_of(program, name) for name in held]
        self._buffers: list[Buffer] = []
        self._versions: list[tuple[int, int]] = []
        self._plans: Bounded[tuple[Any, ...], Plan] = Bounded()
        self.bind()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's forward gives. Arguments that are no tensors must be those it was compiled for."""
        return self.call_flat(self.flatten(args, kwargs))

    def call_flat(self, leaves: list[Any]) -> Any:
        """The same of the arguments' leaves, in the order of the example."""
        plan = self._plan(leaves)
        if plan.executable is None:
            return self._deliver(plan, [], leaves)
        self._refresh()
        inputs = list(self._buffers)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                inputs.append(self.backend.buffer_from_torch(leaf.detach() if leaf.requires_grad else leaf))
        if plan.random:
            inputs.append(fresh_state(self.backend))
        return self._deliver(plan, plan.executable.execute(inputs, plan.donate), leaves)

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Compiles for arguments of these sizes without running anything."""
        self._plan(self.flatten(args, kwargs))

    def executable(self, *args: Any, **kwargs: Any) -> Executable | None:
        """The program for arguments of these sizes; None if nothing is computed."""
        return self._plan(self.flatten(args, kwargs)).executable

    def bind(self) -> None:
        """Puts the module's parameters and buffers on the device anew, in place of what the forward made of them."""
        self._versions = [(-1, -1)] * len(self._tensors)
        self._buffers = [None] * len(self._tensors)
        self._refresh()

    def _refresh(self) -> None:
        """Puts on the device what was written to in the module since."""
        versions = [version_of(tensor) for tensor in self._tensors]
        if versions == self._versions:
            return
        for place, (name, tensor) in enumerate(zip(self._state, self._tensors, strict=True)):
            if versions[place] != self._versions[place]:
                # What is donated must not be memory that the module goes on using.
                owned = tensor.detach().clone() if name in self._mutated else tensor.detach()
                self._buffers[place] = self.backend.buffer_from_torch(owned)
        self._versions = versions

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The module's, with the buffers as they are on the device."""
        state = dict(self.module.state_dict())
        return state | {name: tensor for name, tensor in self._current().items() if name in state}

    @torch.no_grad()
    def sync(self) -> None:
        """Copies the buffers that the forward wrote to into the module."""
        for name, tensor in self._current().items():
            place = self._state[name]
            self._tensors[place].copy_(tensor)
            self._versions[place] = version_of(self._tensors[place])

    def _current(self) -> dict[str, torch.Tensor]:
        # Copies: the next call donates the memory.
        buffers = {name: self._buffers[self._state[name]] for name in self._mutated}
        return {name: self.backend.buffer_to_torch(buffer).clone() for name, buffer in buffers.items()}

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The arguments' leaves. `LoweringError` for another structure than the example's."""
        if len(args) != self._positional or list(kwargs) != self._names:
            args, kwargs = self._arrange(args, kwargs)
        if self._plain and all(isinstance(arg, torch.Tensor) for arg in args):
            return list(args)
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        if spec != self._in_spec:
            raise LoweringError(f"compiled for arguments of the structure {self._in_spec}, and {spec} was given")
        return leaves

    def _arrange(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments by position and by name as they were in the example."""
        signature = inspect.signature(self.module.forward)
        given = signature.bind(*args, **kwargs).arguments
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                given.update(given.pop(name, {}))
            elif parameter.kind is parameter.VAR_POSITIONAL and given.get(name):
                raise LoweringError(f"compiled for {self._positional} positional arguments, not {len(args)}")
        first = list(signature.parameters)[: self._positional]
        wanted = [*first, *self._names]
        missing = [name for name in wanted if name not in given]
        extra = [name for name in given if name not in wanted and given[name] is not None]
        if missing or extra:
            raise LoweringError(f"compiled for the arguments {wanted}; missing: {missing}, unknown: {extra}")
        return tuple(given[name] for name in first), {name: given[name] for name in self._names}

    def _plan(self, leaves: list[Any]) -> Plan:
        key = tuple(leaf.shape if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        return self._plans.get(key) or self._plans.put(key, self._compile(leaves))

    def _compile(self, leaves: list[Any]) -> Plan:
        self._check(leaves)
        builder = self.backend.builder(type(self.module).__name__)
        state = {
            name: builder.parameter(name, self.backend.buffer_shape(self._buffers[place]))
            for name, place in self._state.items()
        }
        arguments: list[Any] = []
        given = iter(leaves)
        for spec in self._inputs:
            if spec.kind is not InputKind.USER_INPUT:
                if not isinstance(spec.arg, TensorArgument):
                    raise LoweringError(f"{spec.arg.name}: a {spec.kind.name} is no input a program can take")
                arguments.append(state[str(spec.target)])
                continue
            leaf = next(given)
            if isinstance(spec.arg, TensorArgument):
                leaf = builder.parameter(spec.arg.name, Shape(dtype_of(leaf.dtype), tuple(leaf.shape)))
            arguments.append(leaf)
        results: list[tuple[int | None, Any]] = []
        computed: list[Op] = []
        for value in lower_graph(self.program.graph_module, builder, arguments):
            if isinstance(value, Op):
                results.append((len(computed), None))
                computed.append(value)
            else:
                results.append((None, value))
        if not computed:
            return Plan(None, results, False, None)
        executable = builder.compile(*computed)
        random = is_random(executable)
        tensors = sum(isinstance(leaf, torch.Tensor) for leaf in leaves)
        donate = [name in self._mutated for name in self._state] + [False] * (tensors + random)
        return Plan(executable, results, random, donate if self._mutated else None)

    def _check(self, leaves: list[Any]) -> None:
        """That the arguments are such as the graph was captured for."""
        values = {node.name: node.meta.get("val") for node in self.program.graph.nodes if node.op == "placeholder"}
        changing: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        for spec, leaf in zip(self._user, leaves, strict=True):
            if isinstance(spec.arg, TensorArgument):
                wanted = values[spec.arg.name]
                if not isinstance(leaf, torch.Tensor):
                    raise LoweringError(f"{spec.arg.name}: a tensor was expected, and {leaf!r} was given")
                fits = (
                    leaf.dtype == wanted.dtype
                    and leaf.dim() == wanted.dim()
                    and all(
                        isinstance(size, torch.SymInt) or size == given
                        for size, given in zip(wanted.shape, leaf.shape, strict=True)
                    )
                )
                if not fits:
                    was = f"{wanted.dtype} {tuple(wanted.shape)}"
                    raise LoweringError(
                        f"{spec.arg.name}: compiled for {was}, and {leaf.dtype} {tuple(leaf.shape)} was given; "
                        "name the sizes that change in dynamic_shapes"
                    )
                changing.append((spec.arg.name, wanted, leaf))
            elif not isinstance(spec.arg, SymIntArgument) and leaf != spec.arg.value:  # type: ignore[union-attr]
                raise LoweringError(f"{spec.arg.name}: compiled for {spec.arg.value!r}, not {leaf!r}")  # type: ignore[union-attr]

        check_sizes(self.program, changing)

    def _deliver(self, plan: Plan, outputs: list[Buffer], leaves: list[Any]) -> Any:
        returned: list[Any] = []
        for spec, (place, known) in zip(self._outputs, plan.results, strict=True):
            if spec.kind in _STATE_MUTATIONS:
                assert place is not None
                self._buffers[self._state[str(spec.target)]] = outputs[place]
            elif spec.kind is OutputKind.USER_INPUT_MUTATION:
                assert place is not None
                with torch.no_grad():
                    leaves[self._places[str(spec.target)]].copy_(self.backend.buffer_to_torch(outputs[place]))
            elif spec.kind is OutputKind.USER_OUTPUT:
                if place is not None and spec.arg.name in self._places:
                    returned.append(leaves[self._places[spec.arg.name]])
                else:
                    returned.append(known if place is None else self.backend.buffer_to_torch(outputs[place]))
            else:
                raise LoweringError(f"{spec.arg.name}: a program has no output of kind {spec.kind.name}")
        return pytree.tree_unflatten(returned, self._out_spec)
