"""Which outputs of a graph own their memory, and which may alias an input, a constant or another output."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from easytorch.backends.graph import Graph, Node, Op
from easytorch.backends.types import OpType

# Operations that may return a view of their first operand, or the operand itself; all others return new memory.
_MAY_VIEW = frozenset(
    {
        *(OpType.IDENTITY, OpType.RESHAPE, OpType.TRANSPOSE, OpType.BROADCAST, OpType.BROADCAST_IN_DIM),
        *(OpType.SLICE, OpType.DYNAMIC_SLICE, OpType.REAL, OpType.IMAG, OpType.BITCAST, OpType.CONVERT_DTYPE),
        *(OpType.SCATTER_MAX, OpType.SCATTER_MIN, OpType.SCATTER_SUM, OpType.SCATTER_SET, OpType.SCATTER_MULTIPLY),
        # Also REDUCE_WINDOW, over windows of one element.
        *(op_type for op_type in OpType if op_type.name.startswith("REDUCE_")),
        *(OpType.BATCH_NORM_FOR_TRAINING, OpType.BATCH_NORM_GRADIENT, OpType.COLLECTIVE_PERMUTE),
    }
)
# Operations whose results may alias memory that they keep, or any other.
_FOREIGN = frozenset(
    {OpType.CONSTANT, OpType.IOTA, OpType.CALL, OpType.COND, OpType.WHILE_LOOP, OpType.SORT, OpType.INVALID}
)


@dataclass(frozen=True, slots=True)
class Ownership:
    """copied: places of outputs that must be copied; parameters: of those that are a parameter's memory, its number;
    own: places of those that are memory nothing else has."""

    copied: frozenset[int]
    parameters: dict[int, int]
    own: frozenset[int]


def root(op: Op) -> Op:
    """The value whose memory `op` may alias."""
    while op.node.op_type in _MAY_VIEW:
        op = op.node.inputs[0]
    return op


def updated_in_place(graph: Graph, nodes: Sequence[Node], writable: Collection[int]) -> set[Node]:
    """The dynamic updates whose operand nothing needs afterwards: they may be written into its memory.

    writable: the numbers of the parameters that may be written to. nodes: those of the graph that run, in order.
    """
    updates = [node for node in nodes if node.op_type is OpType.DYNAMIC_UPDATE_SLICE]
    if not updates:
        return set()
    roots: dict[Op, Op] = {}
    last: dict[Op, int] = {}
    for node in nodes:
        origins = [roots.get(op, op) for op in node.inputs]
        last.update((origin, node.number) for origin in origins)
        if node.op_type in _MAY_VIEW:
            roots.update((Op(node, number), origins[0]) for number in range(len(node.shapes)))
    kept = {roots.get(op, op) for op in graph.outputs} | _passed(nodes)
    found = set()
    for node in updates:
        operand, update = node.inputs[:2]
        source = operand.node
        own = source.op_type not in _FOREIGN and operand not in roots
        if source.op_type is OpType.PARAMETER:
            own = source.attributes["index"] in writable
        if own and last[operand] == node.number and operand not in kept and roots.get(update, update) != operand:
            found.add(node)
    return found


def ownership(graph: Graph) -> Ownership:
    """Which outputs of the graph own their memory; of outputs that share memory all but the first are copied."""
    copied: set[int] = set()
    parameters: dict[int, int] = {}
    seen: set[Op] = set()
    for place, op in enumerate(graph.outputs):
        origin = root(op)
        if origin in seen or origin.node.op_type in _FOREIGN:
            copied.add(place)
        elif origin.node.op_type is OpType.PARAMETER:
            parameters[place] = origin.node.attributes["index"]
        seen.add(origin)
    passed = _passed(graph.nodes)
    own = {place for place, op in enumerate(graph.outputs) if root(op) not in passed} - copied - {*parameters}
    return Ownership(frozenset(copied), parameters, frozenset(own))


def _passed(nodes: Sequence[Node]) -> set[Op]:
    """Values passed to closures, whose results may alias them."""
    return {root(op) for node in nodes if node.op_type in _FOREIGN for op in node.inputs}
