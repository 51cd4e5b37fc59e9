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
from easytorch.frontend.rng import fresh_state, is_random

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
    backend: a configuration as of `backends.new`, or a backend.

    The program computes the forward; its outputs have no gradients.
    """
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(example_inputs, Mapping):
        kwargs.update(example_inputs)
    else:
        args = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else tuple(example_inputs)
    kwargs.update(example_kwargs or {})
    compiled = CompiledModule(module, capture(module, args, kwargs, dynamic_shapes), backend_of(backend))
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


class CompiledModule:
    """A module on a backend. Parameters and buffers are put on the device once (`bind` does it again); buffers that the
    forward writes to stay there, and are seen by `state_dict` and, after `sync`, in the module."""

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
        self._positional, by_name = (in_spec.child(0), in_spec.child(1))
        self._names: list[str] = list(by_name.context or [])
        self._mutated = {spec.target for spec in self._outputs if spec.kind in _STATE_MUTATIONS}
        self._user = [spec for spec in self._inputs if spec.kind is InputKind.USER_INPUT]
        self._places = {spec.arg.name: place for place, spec in enumerate(self._user)}
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._state: dict[str, Buffer] = {}
        self.bind()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's forward gives. Arguments that are no tensors must be those it was compiled for."""
        leaves = self._flatten(args, kwargs)
        plan = self._plan(leaves)
        outputs: list[Buffer] = []
        if plan.executable is not None:
            inputs = list(self._state.values())
            donate = [name in self._mutated for name in self._state]
            for leaf, spec in zip(leaves, self._user, strict=True):
                if isinstance(spec.arg, TensorArgument):
                    inputs.append(self.backend.buffer_from_torch(leaf.detach()))
                    donate.append(False)
            if plan.random:
                inputs.append(fresh_state(self.backend))
                donate.append(False)
            outputs = plan.executable.execute(inputs, donate)
        return self._deliver(plan, outputs, leaves)

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Compiles for arguments of these sizes without running anything."""
        self._plan(self._flatten(args, kwargs))

    def executable(self, *args: Any, **kwargs: Any) -> Executable | None:
        """The program for arguments of these sizes; None if nothing is computed."""
        return self._plan(self._flatten(args, kwargs)).executable

    def bind(self) -> None:
        """Puts the module's parameters and buffers on the device anew, as after loading other weights."""
        for spec in self._inputs:
            if spec.kind is not InputKind.USER_INPUT and isinstance(spec.arg, TensorArgument):
                tensor = tensor_of(self.program, spec.target).detach()
                # What is donated must not be memory that the module goes on using.
                owned = tensor.clone() if spec.target in self._mutated else tensor
                self._state[str(spec.target)] = self.backend.buffer_from_torch(owned)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The module's, with the buffers as they are on the device."""
        state = dict(self.module.state_dict())
        return state | {name: tensor for name, tensor in self._current().items() if name in state}

    @torch.no_grad()
    def sync(self) -> None:
        """Copies the buffers that the forward wrote to into the module."""
        for name, tensor in self._current().items():
            tensor_of(self.program, name).copy_(tensor)

    def _current(self) -> dict[str, torch.Tensor]:
        # Copies: the next call donates the memory.
        return {name: self.backend.buffer_to_torch(self._state[name]).clone() for name in sorted(self._mutated)}

    def _flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        if len(args) != self._positional.num_children or list(kwargs) != self._names:
            args, kwargs = self._arrange(args, kwargs)
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
                raise LoweringError(
                    f"compiled for {self._positional.num_children} positional arguments, not {len(args)}"
                )
        first = list(signature.parameters)[: self._positional.num_children]
        wanted = [*first, *self._names]
        missing = [name for name in wanted if name not in given]
        extra = [name for name in given if name not in wanted and given[name] is not None]
        if missing or extra:
            raise LoweringError(f"compiled for the arguments {wanted}; missing: {missing}, unknown: {extra}")
        return tuple(given[name] for name in first), {name: given[name] for name in self._names}

    def _plan(self, leaves: list[Any]) -> Plan:
        key = tuple(leaf.shape if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._compile(leaves)
        return plan

    def _compile(self, leaves: list[Any]) -> Plan:
        self._check(leaves)
        builder = self.backend.builder(type(self.module).__name__)
        state = {
            name: builder.parameter(name, self.backend.buffer_shape(buffer)) for name, buffer in self._state.items()
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
        executable = builder.compile(*computed) if computed else None
        return Plan(executable, results, executable is not None and is_random(executable))

    def _check(self, leaves: list[Any]) -> None:
        """That the arguments are such as the graph was captured for."""
        values = {node.name: node.meta.get("val") for node in self.program.graph.nodes if node.op == "placeholder"}
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
            elif not isinstance(spec.arg, SymIntArgument) and leaf != spec.arg.value:  # type: ignore[union-attr]
                raise LoweringError(f"{spec.arg.name}: compiled for {spec.arg.value!r}, not {leaf!r}")  # type: ignore[union-attr]

    def _deliver(self, plan: Plan, outputs: list[Buffer], leaves: list[Any]) -> Any:
        returned: list[Any] = []
        for spec, (place, known) in zip(self._outputs, plan.results, strict=True):
            if spec.kind in _STATE_MUTATIONS:
                assert place is not None
                self._state[str(spec.target)] = outputs[place]
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
