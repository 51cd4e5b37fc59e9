"""Several devices in one process: the interpreter's program, with its functions bound to each operation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from easytorch.backends.aten.lowering import Target, bind, constant_on
from easytorch.backends.aten.ops.collectives import COLLECTIVE
from easytorch.backends.graph import Graph, Node
from easytorch.backends.interpreter import Devices, Interpreter, Row, Run, collective
from easytorch.backends.shapeinference import collectives
from easytorch.backends.types import OpType

_CLOSURES = frozenset({OpType.CALL, OpType.COND, OpType.WHILE_LOOP})


class LockstepInterpreter(Interpreter):
    """A graph on `num_devices` simulated devices, all of them on one of torch's, and never compiled."""

    def __init__(self, graph: Graph, device: torch.device, num_devices: int) -> None:
        self._target = Target(device)
        super().__init__(graph, {}, lambda array: constant_on(device, array), num_devices)

    def _closure(self, graph: Graph) -> Interpreter:
        return LockstepInterpreter(graph, self._target.device, self._num_devices)

    def _runner(self, node: Node) -> Run:
        if node.op_type in _CLOSURES:
            return super()._runner(node)
        if node.op_type in collectives.RULES:
            function = COLLECTIVE[node.op_type](node)
            return collective(node, lambda values, **attributes: function(values), self._num_devices)
        kernel, several = bind(node, self._target), len(node.shapes) > 1 or node.op_type is OpType.SORT

        def plain(devices: Devices, rows: Sequence[Row]) -> Sequence[Row]:
            results: list[Tensor | tuple[Tensor, ...]]
            results = [kernel(*(row[place] for row in rows)) for place in range(len(devices))]
            return list(zip(*results, strict=True)) if several else [results]

        return plain
