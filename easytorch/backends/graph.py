"""A computation as it is built: nodes in the order they were added, each with its inferred shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from easytorch.backends.partitioning import Mesh, Sharding
from easytorch.backends.shapes import Shape
from easytorch.backends.types import OpType


@dataclass(eq=False, slots=True)
class Node:
    """One operation. `attributes` are plain values, by the names of the builder's arguments."""

    graph: Graph
    number: int
    op_type: OpType
    inputs: tuple[Op, ...]
    attributes: Mapping[str, Any]
    shapes: tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class Op:
    """One output of a node. Users pass it on and ask nothing of it but its shape."""

    node: Node
    output: int = 0

    @property
    def shape(self) -> Shape:
        """The same as `Builder.op_shape`."""
        return self.node.shapes[self.output]

    def __repr__(self) -> str:
        return f"<{self.node.op_type.go_name} {self.shape}>"


@dataclass(eq=False, slots=True)
class Graph:
    """A named computation. `parent` is the graph in which it is a closure, None for a whole computation.

    `captures` are values of the parent that the closure uses, with the parameter that stands for each, after those it
    was given. With a `mesh` the computation is partitioned, and each parameter and output has a sharding.
    """

    name: str
    parent: Graph | None = None
    nodes: list[Node] = field(default_factory=list)
    parameters: list[Op] = field(default_factory=list)
    outputs: tuple[Op, ...] = ()
    captures: dict[Op, Op] = field(default_factory=dict)
    mesh: Mesh | None = None
    parameter_shardings: list[Sharding] = field(default_factory=list)
    output_shardings: tuple[Sharding, ...] = ()

    def add(
        self, op_type: OpType, inputs: tuple[Op, ...], attributes: Mapping[str, Any], shapes: tuple[Shape, ...]
    ) -> Node:
        """A new node at the end."""
        node = Node(self, len(self.nodes), op_type, inputs, attributes, shapes)
        self.nodes.append(node)
        return node

    @property
    def parameter_shapes(self) -> tuple[Shape, ...]:
        """The shapes of the parameters; captured values come last."""
        return tuple(op.shape for op in self.parameters)

    @property
    def output_shapes(self) -> tuple[Shape, ...]:
        return tuple(op.shape for op in self.outputs)
