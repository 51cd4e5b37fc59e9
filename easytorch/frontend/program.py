"""`Program`: a functional ATen graph on a backend, compiled once for each set of sizes.

Graphs captured by torch.export (module.py) and by dynamo (graph_program.py) share it; the two differ in how arguments
are passed in and outputs returned.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch.fx import GraphModule, Node

from easytorch.backends.builder import Builder
from easytorch.backends.dtypes import dtype_of
from easytorch.backends.graph import Op
from easytorch.backends.interface import Backend, Buffer, Executable
from easytorch.backends.shapes import Shape
from easytorch.frontend.lower import lower_graph
from easytorch.frontend.lru import Bounded
from easytorch.frontend.rng import fresh_state, is_random
from easytorch.frontend.weights import on_device

Delivery = TypeVar("Delivery")


@dataclass(frozen=True)
class Lowered:
    """A graph on a builder, for one set of sizes. arguments: one for each of `placeholders`, which stand for `given`;
    values: the graph's outputs."""

    builder: Builder
    placeholders: Sequence[Node]
    given: Sequence[Any]
    arguments: Sequence[Any]
    values: Sequence[Any]


@dataclass(frozen=True)
class Compiled(Generic[Delivery]):
    """The executable for one set of sizes; None if nothing is computed.

    inputs: the numbers, among the arguments that are not held, of those that it takes, after the held ones.
    delivery: what an adapter needs to hand its outputs out.
    """

    executable: Executable | None
    inputs: tuple[int, ...]
    random: bool
    donate: list[bool] | None
    delivery: Delivery


class Program(Generic[Delivery]):
    """A graph that is compiled for each new set of argument sizes on first use.

    collect: which ops a program returns, and the `delivery` of what is compiled.
    held: the tensors that stay on the device, by the number of their placeholder; `execute` is given their buffers.
    donated: the numbers of those whose memory a call may reuse for its outputs.
    """

    def __init__(
        self,
        graph: GraphModule,
        backend: Backend,
        name: str,
        collect: Callable[[Lowered], tuple[list[Op], Delivery]],
        held: Mapping[int, torch.Tensor] | None = None,
        donated: Collection[int] = (),
    ) -> None:
        self.backend = backend
        self._graph = graph
        self._name = name
        self._collect = collect
        self._held = dict(held or {})
        self._donated = [number in donated for number in self._held] if donated else None
        self._placeholders = graph.graph.find_nodes(op="placeholder")
        self._compiled: Bounded[tuple[Any, ...], Compiled[Delivery]] = Bounded()

    def find(self, given: Sequence[Any]) -> Compiled[Delivery] | None:
        """The executable compiled for arguments of these sizes, or None; `given` are those that are not held."""
        return self._compiled.get(_key(given))

    def compile(self, given: Sequence[Any]) -> Compiled[Delivery]:
        """The graph compiled for arguments of these sizes."""
        builder = self.backend.builder(self._name)
        state = {number: self._parameter(builder, number, tensor) for number, tensor in self._held.items()}
        rest = iter(given)
        values = [self._held[n] if n in self._held else next(rest) for n in range(len(self._placeholders))]
        arguments = [
            state[n] if n in state else self._parameter(builder, n, value) if isinstance(value, torch.Tensor) else value
            for n, value in enumerate(values)
        ]
        outputs = lower_graph(self._graph, builder, arguments)
        computed, delivery = self._collect(Lowered(builder, self._placeholders, values, arguments, outputs))
        executable = builder.compile(*computed) if computed else None
        random = executable is not None and is_random(executable)
        inputs = tuple(number for number, value in enumerate(given) if isinstance(value, torch.Tensor))
        donate = None if self._donated is None else [*self._donated, *([False] * (len(inputs) + random))]
        return self._compiled.put(_key(given), Compiled(executable, inputs, random, donate, delivery))

    def execute(self, compiled: Compiled[Delivery], given: Sequence[Any], held: Sequence[Buffer] = ()) -> list[Buffer]:
        """The outputs for the inputs `given` and the buffers of the held tensors."""
        if compiled.executable is None:
            return []
        inputs = [*held, *(on_device(self.backend, given[number]) for number in compiled.inputs)]
        if compiled.random:
            inputs.append(fresh_state(self.backend))
        return compiled.executable.execute(inputs, compiled.donate)

    def _parameter(self, builder: Builder, number: int, tensor: torch.Tensor) -> Op:
        # The graph's own names: a module may call a buffer and an argument the same.
        return builder.parameter(self._placeholders[number].name, Shape(dtype_of(tensor.dtype), tuple(tensor.shape)))


def _key(given: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(value.shape if isinstance(value, torch.Tensor) else value for value in given)
