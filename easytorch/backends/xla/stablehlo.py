"""A graph as the text of a StableHLO module (https://openxla.org/stablehlo/spec), in one pass over its nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from easytorch.backends.graph import Graph, Node, Op
from easytorch.backends.partitioning import Mesh, Sharding
from easytorch.backends.shapeinference import accepted_dtypes
from easytorch.backends.types import Capabilities, OpType
from easytorch.backends.xla.emitter import ELEMENT_TYPES, Emitter, Value, sdy_sharding, tensor
from easytorch.backends.xla.ops import (
    Emit,
    collectives,
    control,
    conversion,
    elementwise,
    indexing,
    movement,
    normalization,
    product,
    random,
    reduction,
    sorting,
    windows,
)

EMITTERS: Mapping[OpType, Emit] = {
    **elementwise.EMITTERS,
    **conversion.EMITTERS,
    **movement.EMITTERS,
    **reduction.EMITTERS,
    **windows.EMITTERS,
    **product.EMITTERS,
    **indexing.EMITTERS,
    **normalization.EMITTERS,
    **sorting.EMITTERS,
    **control.EMITTERS,
    **collectives.EMITTERS,
    **random.EMITTERS,
}
# These have no emitter: they are the arguments and literals of a module.
_GIVEN = (OpType.PARAMETER, OpType.CONSTANT)

CAPABILITIES = Capabilities(
    {op_type: accepted_dtypes(op_type) for op_type in (*_GIVEN, *EMITTERS)}, frozenset(ELEMENT_TYPES)
)


class GraphEmitter(Emitter):
    """Writes graphs, and those of closures inside them."""

    def inline(self, graph: Graph, arguments: Sequence[Value]) -> list[Value]:
        """Writes the graph's operations with `arguments` as its parameters; returns its outputs."""
        values: dict[tuple[int, int], Value] = {
            (op.node.number, 0): value for op, value in zip(graph.parameters, arguments, strict=True)
        }
        for node in graph.nodes:
            if node.op_type is not OpType.PARAMETER:
                self._write(node, values)
        return [values[_key(op)] for op in graph.outputs]

    def _write(self, node: Node, values: dict[tuple[int, int], Value]) -> None:
        if node.op_type is OpType.CONSTANT:
            written = conversion.constant(self, node.attributes["value"], node.shapes[0])
        else:
            operands = [values[_key(op)] for op in node.inputs]
            written = EMITTERS[node.op_type](self, *operands, **node.attributes)
        if isinstance(written, Value):
            values[node.number, 0] = written
        else:
            for output, value in enumerate(written):
                values[node.number, output] = value


def _key(op: Op) -> tuple[int, int]:
    return op.node.number, op.output


def emit(graph: Graph, num_devices: int = 1, aliases: Mapping[int, int] | None = None) -> str:
    """The module of a whole computation.

    aliases: number of a parameter -> number of the output that reuses its memory.
    """
    emitter = GraphEmitter(num_devices)
    arguments = [Value(f"%arg{number}", shape) for number, shape in enumerate(graph.parameter_shapes)]
    results = emitter.inline(graph, arguments)
    mesh = graph.mesh
    parameters = ", ".join(
        f"{value.name}: {tensor(value.shape)}{_attributes(graph.parameter_shardings, number, aliases)}"
        for number, value in enumerate(arguments)
    )
    names, types = ", ".join(value.name for value in results), ", ".join(tensor(value.shape) for value in results)
    returned = ", ".join(
        f"{tensor(value.shape)}{_attributes(graph.output_shardings, number)}" for number, value in enumerate(results)
    )
    return "\n".join(
        (
            f"module @{_identifier(graph.name)} attributes "
            f"{{mhlo.num_partitions = {1 if mesh is None else mesh.size} : i32, "
            f"mhlo.num_replicas = {num_devices} : i32}} {{",
            *([] if mesh is None else [f"sdy.mesh @mesh = <[{_axes(mesh)}]>"]),
            f"func.func public @main({parameters}) -> ({returned}) {{",
            *emitter.lines,
            f'"func.return"({names}) : ({types}) -> ()',
            "}",
            "}",
        )
    )


def _attributes(shardings: Sequence[Sharding], number: int, aliases: Mapping[int, int] | None = None) -> str:
    """Of an argument or result: its sharding, and the output that reuses its memory."""
    found = [f"sdy.sharding = {sdy_sharding(shardings[number])}"] if shardings else []
    if aliases and number in aliases:
        found.append(f"tf.aliasing_output = {aliases[number]} : i32")
    return f" {{{', '.join(found)}}}" if found else ""


def _axes(mesh: Mesh) -> str:
    return ", ".join(f'"{name}"={size}' for name, size in zip(mesh.names, mesh.sizes, strict=True))


def _identifier(name: str) -> str:
    """A valid MLIR identifier: other characters of a user's name are replaced."""
    plain = "".join(character if character.isascii() and character.isalnum() else "_" for character in name)
    return f"m_{plain}"
