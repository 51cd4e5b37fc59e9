"""Which outputs of a graph are memory of their own, and which may be an input's, a constant's or another output's."""

from __future__ import annotations

from dataclasses import dataclass

from easytorch.backends.graph import Graph, Op
from easytorch.backends.types import OpType

# What may give a view of its first operand, or that operand itself; every other operation gives memory of its own.
_MAY_VIEW = frozenset(
    {
        *(OpType.IDENTITY, OpType.RESHAPE, OpType.TRANSPOSE, OpType.BROADCAST, OpType.BROADCAST_IN_DIM),
        *(OpType.SLICE, OpType.DYNAMIC_SLICE, OpType.REAL, OpType.IMAG, OpType.BITCAST, OpType.CONVERT_DTYPE),
        *(OpType.SCATTER_MAX, OpType.SCATTER_MIN, OpType.SCATTER_SUM, OpType.REDUCE_WINDOW),
        *(op_type for op_type in OpType if op_type.name.startswith("REDUCE_")),
        *(OpType.BATCH_NORM_FOR_TRAINING, OpType.BATCH_NORM_GRADIENT),
    }
)
# What gives memory that it also keeps, or that came from anywhere.
_FOREIGN = frozenset(
    {OpType.CONSTANT, OpType.IOTA, OpType.CALL, OpType.COND, OpType.WHILE_LOOP, OpType.SORT, OpType.INVALID}
)


@dataclass(frozen=True, slots=True)
class Ownership:
    """copied: places of outputs that must be copied; parameters: of those that are a parameter's memory, its number."""

    copied: frozenset[int]
    parameters: dict[int, int]


def root(op: Op) -> Op:
    """The value in whose memory `op` may stand."""
    while op.node.op_type in _MAY_VIEW:
        op = op.node.inputs[0]
    return op


def ownership(graph: Graph) -> Ownership:
    """Of the outputs of a graph; of several in one memory, all but the first are copied."""
    copied, parameters, seen = set(), {}, set()
    for place, op in enumerate(graph.outputs):
        origin = root(op)
        if origin in seen or origin.node.op_type in _FOREIGN:
            copied.add(place)
        elif origin.node.op_type is OpType.PARAMETER:
            parameters[place] = origin.node.attributes["index"]
        seen.add(origin)
    return Ownership(frozenset(copied), parameters)
