"""`GraphProgram`: a functional ATen graph as a function of tensors and sizes, compiled once for each set of sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from easytorch.backends.graph import Op
from easytorch.backends.interface import Backend, Buffer
from easytorch.frontend.device_tensor import DeviceTensor
from easytorch.frontend.program import Lowered, Program
from easytorch.frontend.views import View, shared_roots, sizes_of, view_of


@dataclass(frozen=True)
class Result:
    """The source of one output of the graph: the index of an input, the index of an output of the executable, or the
    constant `value`. `order`: the axes of the torch tensor in the order of the output's memory; `view`: shape, strides
    and offset in that memory where the output is a view of it."""

    input: int | None = None
    output: int | None = None
    value: Any = None
    order: tuple[int, ...] | None = None
    view: View | None = None


class GraphProgram:
    """Called with a list, which it empties so that nothing is kept alive longer than needed.

    The first `visible` outputs are torch tensors with the strides that torch would give them, the rest stay on the
    device (`DeviceTensor`).
    """

    def __init__(self, graph: GraphModule, backend: Backend, name: str, visible: int) -> None:
        self._graph = graph
        self._backend = backend
        self._name = name
        self._visible = visible
        self._outputs: list[Any] = list(graph.graph.output_node().args[0])  # type: ignore[arg-type]
        self._roots = shared_roots(self._outputs[:visible])
        computed = [self._roots.get(number, node) for number, node in enumerate(self._outputs)]
        graph.graph.output_node().args = (tuple(computed),)
        self._orders = [_memory_order(node) if number < visible else None for number, node in enumerate(computed)]
        self._program = Program(graph, backend, name, self._collect)

    def __call__(self, arguments: list[Any]) -> list[Any]:
        """The outputs of the graph."""
        given = list(arguments)
        arguments.clear()
        compiled = self._program.find(given) or self._program.compile(given)
        outputs = self._program.execute(compiled, given)
        tensors: dict[Any, torch.Tensor] = {}
        return [
            self._deliver(result, number, given, outputs, tensors) for number, result in enumerate(compiled.delivery)
        ]

    def _deliver(
        self, result: Result, number: int, given: list[Any], outputs: list[Buffer], tensors: dict[Any, Any]
    ) -> Any:
        if result.input is not None:
            return given[result.input]
        if result.output is None:
            return result.value
        # An output that is named twice is one tensor, as in eager; what the caller sees of it is no DeviceTensor.
        key = (result.output, result.order)
        if key not in tensors:
            if number < self._visible:
                tensor = self._backend.buffer_to_torch(outputs[result.output])
                tensors[key] = tensor if result.order is None else tensor.permute(_inverse(result.order))
            else:
                tensors[key] = DeviceTensor(self._backend, outputs[result.output])
        return tensors[key] if result.view is None else tensors[key].as_strided(*result.view)

    def _collect(self, lowered: Lowered) -> tuple[list[Op], list[Result]]:
        builder = lowered.builder
        inputs = [number for number, value in enumerate(lowered.arguments) if isinstance(value, Op)]
        places = {lowered.arguments[number]: number for number in reversed(inputs)}
        sizes = sizes_of(lowered.placeholders, lowered.given) if self._roots else {}
        turned: dict[tuple[Op, tuple[int, ...]], Op] = {}
        computed: dict[Op, int] = {}
        results = []
        for number, (value, order) in enumerate(zip(lowered.values, self._orders, strict=True)):
            if not isinstance(value, Op):
                results.append(Result(value=value))
            elif value in places:
                results.append(Result(input=places[value]))
            else:
                if order is not None:
                    if (value, order) not in turned:
                        turned[value, order] = builder.transpose(value, order)
                    value = turned[value, order]
                output, base, view = computed.setdefault(value, len(computed)), self._roots.get(number), None
                if base is not None and base is not self._outputs[number]:
                    view = view_of(self._outputs[number], base, sizes)
                results.append(Result(output=output, order=order, view=view))
        return list(computed), results


def _memory_order(node: Any) -> tuple[int, ...] | None:
    """The axes of a dense tensor from the slowest to the fastest in memory; None if that is their own order, or if the
    tensor has gaps or repeats itself."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return None
    sizes, strides = ([_hint(number) for number in numbers] for numbers in (value.shape, value.stride()))
    order = tuple(sorted(range(len(sizes)), key=lambda axis: (-strides[axis], axis)))
    expected = 1
    for axis in reversed(order):
        if sizes[axis] != 1 and strides[axis] != expected:
            return None
        expected *= sizes[axis]
    return None if order == tuple(range(len(sizes))) else order


def _hint(number: int | torch.SymInt) -> int:
    """A size that depends on data has none: the lowering of what gives it says so."""
    if not isinstance(number, torch.SymInt):
        return number
    return int(number.node.hint) if number.node.has_hint() else 0


def _inverse(order: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=order.__getitem__))
