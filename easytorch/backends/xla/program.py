"""Compiled programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from easytorch.backends.errors import BackendError, OpNotImplementedError
from easytorch.backends.executable import CheckedExecutable, local_shapes
from easytorch.backends.graph import Graph
from easytorch.backends.interface import Buffer
from easytorch.backends.partitioning import Mesh
from easytorch.backends.shapes import Shape
from easytorch.backends.xla import cache, pjrt
from easytorch.backends.xla.buffers import XlaBuffer, spec
from easytorch.backends.xla.folding import folds_large_values
from easytorch.backends.xla.stablehlo import emit

if TYPE_CHECKING:
    from easytorch.backends.xla.backend import XlaBackend

_specs, _arrays = attrgetter("spec"), attrgetter("array")


class XlaExecutable(CheckedExecutable):
    """A program, and one more for each set of donated inputs asked for, whose outputs reuse their memory."""

    def __init__(self, backend: XlaBackend, graph: Graph, num_devices: int) -> None:
        super().__init__(backend, graph, num_devices)
        self._graph: Graph | None = graph
        count = self._num_devices
        self._devices = backend.devices[:count]
        self._wanted = [spec(shape, device) for device in range(count) for shape in self._input_shapes]
        self._given = [spec(shape, device) for device in range(count) for shape in self._output_shapes]
        # Keyed by the inputs whose memory outputs reuse. Arrays are given and returned device by device.
        self._callers: dict[frozenset[int], pjrt.Caller] = {}
        self._plain: pjrt.Caller | None = self._caller(frozenset())

    def execute(self, inputs: Sequence[Buffer], donate: Sequence[bool] | None = None) -> list[Buffer]:
        """Checks, then runs."""
        plain = self._plain
        if plain is None or donate is not None or self._backend.is_finalized():
            return super().execute(inputs, donate)
        try:
            # Arrays first: a buffer released in between loses its spec before its array.
            arrays = list(map(_arrays, inputs))
            fits = list(map(_specs, inputs)) == self._wanted
        except (AttributeError, TypeError):
            fits = False
        if not fits:
            # Says what is wrong.
            return super().execute(inputs)
        try:
            return list(map(XlaBuffer, plain(arrays), self._given))
        except pjrt.RuntimeErrors as error:
            raise self._failed(error) from error

    def _prepare(self, donate: Sequence[bool]) -> None:
        self._caller(self._everywhere(donate))

    def _everywhere(self, donate: Sequence[bool]) -> frozenset[int]:
        """An input counts as donated where all devices donate it."""
        count = len(self._names)
        return frozenset(n for n in range(count) if all(donate[n::count])) if any(donate) else frozenset()

    def _take(self, inputs: Sequence[Buffer], donate: Sequence[bool]) -> tuple[pjrt.Caller, list[Any]]:
        for number, (buffer, given) in enumerate(zip(inputs, donate, strict=True)):
            if given and buffer.shared is not None:
                self._refuse_shared(number)
        call, arrays = self._caller(self._everywhere(donate)), [buffer.array for buffer in inputs]
        for buffer, given in zip(inputs, donate, strict=True):
            if given:
                buffer.release("donated")
        return call, arrays

    def _run(self, taken: tuple[pjrt.Caller, list[Any]]) -> list[Buffer]:
        call, arrays = taken
        try:
            results = call(arrays)
        except pjrt.RuntimeErrors as error:
            raise self._failed(error) from error
        return list(map(XlaBuffer, results, self._given))

    def _failed(self, error: BaseException) -> BackendError:
        return BackendError(f"{self._name!r}: XLA cannot run it: {error}")

    def _caller(self, donated: frozenset[int]) -> pjrt.Caller:
        aliases = _aliases(donated, self._input_shapes, self._output_shapes)
        key = frozenset(aliases)
        if key not in self._callers:
            graph = self._graph
            if graph is None:
                raise BackendError(f"{self._name!r} is finalized; compile it again")
            self._callers[key] = self._compile(graph, aliases)
        return self._callers[key]

    def _compile(self, graph: Graph, aliases: Mapping[int, int]) -> pjrt.Caller:
        """aliases: donated input -> the output that reuses its memory."""
        mesh = graph.mesh
        text = emit(graph, self._num_devices if mesh is None else 1, aliases)
        program = cache.compile_module(text, self._devices, not folds_large_values(graph), mesh is not None)
        if self._num_devices == 1:
            outputs = [(shape.dimensions, shape.dtype.numpy) for shape in graph.output_shapes]
            return pjrt.caller(program, outputs, self._devices[0])
        replicas = Mesh(("replica",), (self._num_devices,))
        parts = [()] * len(self._names) if mesh is None else graph.parameter_shardings
        shardings = [pjrt.mesh_sharding(self._devices, mesh or replicas, one) for one in parts]
        shapes = [shape.dimensions for shape in graph.parameter_shapes]
        count = len(self._names)

        def call(arrays: list[Any]) -> list[Any]:
            by_argument = [arrays[number::count] for number in range(count)]
            results = pjrt.call_on_all(program, by_argument, shapes, shardings)
            return [shards[device] for device in range(self._num_devices) for shards in results]

        return call

    def finalize(self) -> None:
        """Frees the programs."""
        super().finalize()
        self._plain = self._graph = None
        self._callers.clear()


class JitExecutable(XlaExecutable):
    """The same through `jax.jit` and public classes of jax only; on one device."""

    def _compile(self, graph: Graph, aliases: Mapping[int, int]) -> pjrt.Caller:
        from easytorch.backends.xla.export import jit_caller

        if self._num_devices > 1:
            raise OpNotImplementedError(
                f"{self._name!r}: 'xla:jit' runs on one device; use 'xla' for {self._num_devices}"
            )
        return jit_caller(graph, aliases, self._devices[0])


def matched_outputs(donated: frozenset[int], graph: Graph) -> dict[int, int]:
    """Donated parameter of a graph -> the output that reuses its memory on each device."""
    return _aliases(donated, *local_shapes(graph))


def _aliases(donated: frozenset[int], inputs: Sequence[Shape], outputs: Sequence[Shape]) -> dict[int, int]:
    """Donated input -> an output of the same shape, as far as there are any."""
    free = list(range(len(outputs)))
    aliases = {}
    for number in sorted(donated):
        match = next((output for output in free if outputs[output] == inputs[number]), None)
        if match is not None:
            free.remove(match)
            aliases[number] = match
    return aliases
