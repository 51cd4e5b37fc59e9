"""Runs a graph node by node on arrays, for backends without a compiler.

A backend provides a table of functions of the operands and the attributes, by the names of the builder's arguments. All
devices of a computation run in lockstep, so that collectives are functions of one list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from easytorch.backends.errors import BackendError
from easytorch.backends.graph import Graph, Node, Op
from easytorch.backends.shapeinference import collectives
from easytorch.backends.types import OpType

Value = Any
# The values of one operation on the running devices, in order.
Row = Sequence[Value]
Devices = tuple[int, ...]
Function = Callable[..., Any]
Functions = Mapping[OpType, Function]
Run = Callable[[Devices, Sequence[Row]], Sequence[Row]]
# What the interpreter does itself.
CONTROL = frozenset({OpType.PARAMETER, OpType.CONSTANT, OpType.CALL, OpType.WHILE_LOOP, OpType.COND})


@dataclass(frozen=True, slots=True)
class _Step:
    run: Run
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dead: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BoundClosure:
    """A closure with its captures: what the function of an operation like SORT gets for its graph."""

    graph: Graph
    program: Interpreter
    captures: tuple[Value, ...]
    device: int

    def __call__(self, *values: Value) -> tuple[Value, ...]:
        """The outputs for these parameters."""
        rows = self.program.run((self.device,), [(value,) for value in (*values, *self.captures)])
        return tuple(row[0] for row in rows)


class Interpreter:
    """A graph in the order it runs: without nodes that nothing needs, values forgotten after their last use.

    functions: for each kind of operation but those of `CONTROL` a function of the operands, as positional arguments,
    and the attributes. It gives one value, or a tuple where the operation has several outputs. A collective's function
    takes the list of the values of one group's devices (of all devices for COLLECTIVE_PERMUTE) and gives such a list;
    replica_groups are not passed on. SORT takes a `BoundClosure` for its comparator, and always gives a tuple.
    constant: makes a value of a CONSTANT's array.
    """

    def __init__(
        self, graph: Graph, functions: Functions, constant: Callable[[np.ndarray], Value], num_devices: int = 1
    ) -> None:
        self._functions = functions
        self._constant = constant
        self._num_devices = num_devices
        self._slots: dict[Op, int] = {}
        needed = needed_nodes(graph)
        last_use = {op: node.number for node in needed for op in node.inputs}
        kept = set(graph.outputs)
        self._parameters = [self._slot(op) for op in graph.parameters]
        self._constants: dict[int, Value] = {}
        self._steps: list[_Step] = []
        for node in needed:
            outputs = tuple(Op(node, number) for number in range(len(node.shapes)))
            if node.op_type is OpType.CONSTANT:
                self._constants[self._slot(outputs[0])] = constant(node.attributes["value"])
            elif node.op_type is not OpType.PARAMETER:
                dead = {op for op in node.inputs if last_use[op] == node.number and op not in kept}
                dead |= {op for op in outputs if op not in last_use and op not in kept}
                self._steps.append(
                    _Step(
                        self._runner(node),
                        tuple(self._slot(op) for op in node.inputs),
                        tuple(self._slot(op) for op in outputs),
                        tuple(self._slot(op) for op in dead),
                    )
                )
        self._outputs = [self._slot(op) for op in graph.outputs]

    def run(self, devices: Devices, arguments: Sequence[Row]) -> list[Row]:
        """The rows of the outputs for the rows of the parameters."""
        values: list[Row] = [()] * len(self._slots)
        for slot, constant in self._constants.items():
            values[slot] = (constant,) * len(devices)
        for slot, row in zip(self._parameters, arguments, strict=True):
            values[slot] = row
        for step in self._steps:
            results = step.run(devices, [values[slot] for slot in step.inputs])
            for slot, row in zip(step.outputs, results, strict=True):
                values[slot] = row
            for slot in step.dead:
                values[slot] = ()
        return [values[slot] for slot in self._outputs]

    def _slot(self, op: Op) -> int:
        return self._slots.setdefault(op, len(self._slots))

    def _closure(self, graph: Graph) -> Interpreter:
        return Interpreter(graph, self._functions, self._constant, self._num_devices)

    def _runner(self, node: Node) -> Run:
        attributes = node.attributes
        if node.op_type is OpType.CALL:
            return self._closure(attributes["function"]).run
        if node.op_type is OpType.COND:
            return self._cond(attributes["true_branch"], attributes["false_branch"])
        if node.op_type is OpType.WHILE_LOOP:
            return self._loop(attributes["cond"], attributes["body"])
        function = self._functions[node.op_type]
        if node.op_type in collectives.RULES:
            return collective(node, function, self._num_devices)
        if node.op_type is OpType.SORT:
            return self._sort(node, function)
        if node.op_type is OpType.SELECT_AND_SCATTER:
            graphs = {name: attributes[name] for name in ("select", "scatter")}
            bound = {name: BoundClosure(graph, self._closure(graph), (), 0) for name, graph in graphs.items()}
            attributes = {**attributes, **bound}
        several = len(node.shapes) > 1

        def plain(devices: Devices, rows: Sequence[Row]) -> Sequence[Row]:
            results = [function(*(row[place] for row in rows), **attributes) for place in range(len(devices))]
            return list(zip(*results, strict=True)) if several else [results]

        return plain

    def _cond(self, true_branch: Graph, false_branch: Graph) -> Run:
        first, second = self._closure(true_branch), self._closure(false_branch)
        count = len(true_branch.captures)

        def cond(devices: Devices, rows: Sequence[Row]) -> Sequence[Row]:
            holds = [bool(value) for value in rows[0]]
            results: list[list[Value]] = [[None] * len(devices) for _ in true_branch.outputs]
            for truth, program, captures in ((True, first, rows[1 : 1 + count]), (False, second, rows[1 + count :])):
                places = [place for place, value in enumerate(holds) if value is truth]
                if places:
                    _write(results, places, program.run(_pick(devices, places), _picked(captures, places)))
            return results

        return cond

    def _loop(self, cond: Graph, body: Graph) -> Run:
        test, step = self._closure(cond), self._closure(body)
        state_count, test_count = len(body.outputs), len(cond.captures)

        def loop(devices: Devices, rows: Sequence[Row]) -> Sequence[Row]:
            state = [list(row) for row in rows[:state_count]]
            test_captures, step_captures = (
                rows[state_count : state_count + test_count],
                rows[state_count + test_count :],
            )
            places = list(range(len(devices)))
            while True:
                going = _pick(devices, places)
                (holds,) = test.run(going, _picked([*state, *test_captures], places))
                places = [place for place, value in zip(places, holds, strict=True) if bool(value)]
                if not places:
                    return state
                _write(state, places, step.run(_pick(devices, places), _picked([*state, *step_captures], places)))

        return loop

    def _sort(self, node: Node, function: Function) -> Run:
        attributes = dict(node.attributes)
        graph = attributes.pop("comparator")
        program = self._closure(graph)
        count = len(node.shapes)

        def sort(devices: Devices, rows: Sequence[Row]) -> Sequence[Row]:
            results = []
            for place, device in enumerate(devices):
                operands = [row[place] for row in rows]
                comparator = BoundClosure(graph, program, tuple(operands[count:]), device)
                results.append(function(*operands[:count], comparator=comparator, **attributes))
            return list(zip(*results, strict=True))

        return sort


def collective(node: Node, function: Function, num_devices: int) -> Run:
    """Runs `function` on the values of each group's devices."""
    attributes = dict(node.attributes)
    groups = attributes.pop("replica_groups", None) or (tuple(range(num_devices)),)

    def together(devices: Devices, rows: Sequence[Row]) -> Sequence[Row]:
        values = dict(zip(devices, rows[0], strict=True))
        results: dict[int, Value] = {}
        for group in groups:
            present = [device for device in group if device in values]
            if present and len(present) < len(group):
                raise BackendError(
                    f"{node.op_type.go_name}: of the devices {list(group)} only {present} come here; "
                    "those of one group must take the same branches"
                )
            if present:
                results.update(zip(group, function([values[device] for device in group], **attributes), strict=True))
        return [[results[device] for device in devices]]

    return together


def _pick(row: Sequence[Any], places: Sequence[int]) -> tuple[Any, ...]:
    return tuple(row[place] for place in places)


def _picked(rows: Sequence[Row], places: Sequence[int]) -> list[Row]:
    return [_pick(row, places) for row in rows]


def _write(rows: Sequence[list[Value]], places: Sequence[int], given: Sequence[Row]) -> None:
    for row, values in zip(rows, given, strict=True):
        for place, value in zip(places, values, strict=True):
            row[place] = value


def needed_nodes(graph: Graph) -> list[Node]:
    """The nodes that the outputs depend on, in order."""
    reached = {op.node.number for op in graph.outputs}
    for node in reversed(graph.nodes):
        if node.number in reached:
            reached.update(op.node.number for op in node.inputs)
    return [node for node in graph.nodes if node.number in reached]
