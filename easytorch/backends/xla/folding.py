"""Constants that XLA would fold while it compiles.

XLA folds an operation on constants, a broadcast of one included, by its own plain evaluator on the host: of large
arrays that takes minutes, and where there is no room for a result it aborts the process.
"""

from __future__ import annotations

from collections.abc import Iterable

from easytorch.backends.graph import Graph, Node

# Values of programs that pay for being folded are much smaller.
LIMIT_BYTES = 2**28


def folds_large_values(graph: Graph) -> bool:
    """Whether a value of more than LIMIT_BYTES depends on constants alone."""
    return _folds(graph, (parameter.node for parameter in graph.parameters))


def _folds(graph: Graph, varying: Iterable[Node]) -> bool:
    varies = set(varying)
    for node in graph.nodes:
        if node in varies or any(op.node in varies for op in node.inputs):
            varies.add(node)
        elif any(shape.nbytes > LIMIT_BYTES for shape in node.shapes):
            return True
        for closure in node.attributes.values():
            if not isinstance(closure, Graph):
                continue
            # Captured constants are constants there; so are all parameters where nothing given varies.
            constant = {parameter.node for op, parameter in closure.captures.items() if op.node not in varies}
            given = {parameter.node for parameter in closure.parameters} if node in varies else set()
            if _folds(closure, given - constant):
                return True
    return False
