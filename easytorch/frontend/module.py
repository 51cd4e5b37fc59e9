"""`compile`: a torch module as a program of a backend, called as the module is."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, SymIntArgument, TensorArgument
from torch.utils import _pytree as pytree

from easytorch.backends.graph import Op
from easytorch.backends.interface import Backend, Buffer, Executable
from easytorch.frontend.capture import capture, tensor_of
from easytorch.frontend.errors import LoweringError
from easytorch.frontend.program import Compiled, Lowered, Program
from easytorch.frontend.ranges import check_sizes
from easytorch.frontend.routing import backend_for
from easytorch.frontend.weights import Weights

# For each output of a graph: its index among the executable's outputs, or the value itself if it is static.
Results = list[tuple[int | None, Any]]
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
    compiled = CompiledModule(module, program, backend_for(program.graph_module, backend))
    compiled.prepare(*args, **kwargs)
    return compiled


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
        # Where each parameter and buffer is among those on the device, and among the graph's placeholders.
        self._state: dict[str, int] = {}
        held: dict[int, torch.Tensor] = {}
        for number, spec in enumerate(self._inputs):
            if spec.kind is InputKind.USER_INPUT:
                continue
            if not isinstance(spec.arg, TensorArgument):
                raise LoweringError(f"{spec.arg.name}: a {spec.kind.name} is no input a program can take")
            self._state[str(spec.target)] = len(held)
            held[number] = tensor_of(program, spec.target)
        written = {str(spec.target) for spec in self._outputs if spec.kind in _STATE_MUTATIONS}
        self._mutated = sorted(written & self._state.keys())
        places = {self._state[name] for name in self._mutated}
        self._weights = Weights(backend, list(held.values()), places)
        donated = [number for place, number in enumerate(held) if place in places]
        self._graph = Program(program.graph_module, backend, type(module).__name__, _results, held, donated)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of the module's forward. Arguments that are not tensors must be those it was compiled for."""
        return self.call_flat(self.flatten(args, kwargs))

    def call_flat(self, leaves: list[Any]) -> Any:
        """The same with the arguments' leaves, in the order of the example."""
        compiled = self._compiled(leaves)
        held = [] if compiled.executable is None else self._weights.buffers()
        return self._deliver(compiled.delivery, self._graph.execute(compiled, leaves, held), leaves)

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Compiles for arguments of these sizes without running anything."""
        self._compiled(self.flatten(args, kwargs))

    def executable(self, *args: Any, **kwargs: Any) -> Executable | None:
        """The program for arguments of these sizes; None if nothing is computed."""
        return self._compiled(self.flatten(args, kwargs)).executable

    def bind(self) -> None:
        """Copies the module's parameters and buffers to the device again, discarding what the forward wrote to them."""
        self._weights.bind()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The module's, with the buffers as they are on the device."""
        state, written = dict(self.module.state_dict()), self._weights.written()
        return state | {name: written[self._state[name]] for name in self._mutated if name in state}

    def sync(self) -> None:
        """Copies the buffers that the forward wrote to into the module."""
        self._weights.sync()

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

    def _compiled(self, leaves: list[Any]) -> Compiled[Results]:
        compiled = self._graph.find(leaves)
        if compiled is None:
            self._check(leaves)
            compiled = self._graph.compile(leaves)
        return compiled

    def _check(self, leaves: list[Any]) -> None:
        """Checks that the graph was captured for such arguments."""
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
            elif not isinstance(spec.arg, SymIntArgument) and leaf != spec.arg.value:
                raise LoweringError(f"{spec.arg.name}: compiled for {spec.arg.value!r}, not {leaf!r}")

        check_sizes(self.program, changing)

    def _deliver(self, results: Results, outputs: list[Buffer], leaves: list[Any]) -> Any:
        returned: list[Any] = []
        for spec, (place, known) in zip(self._outputs, results, strict=True):
            if spec.kind in _STATE_MUTATIONS:
                assert place is not None
                self._weights.put(self._state[str(spec.target)], outputs[place])
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


def _results(lowered: Lowered) -> tuple[list[Op], Results]:
    # Each has an output of its own: one may become a buffer that the next call donates, another the caller's tensor.
    computed: list[Op] = []
    results: Results = []
    for value in lowered.values:
        results.append((len(computed), None) if isinstance(value, Op) else (None, value))
        if isinstance(value, Op):
            computed.append(value)
    return computed, results
