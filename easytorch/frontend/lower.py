"""A torch graph, node by node, onto a builder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from easytorch.backends.builder import Builder
from easytorch.backends.dtypes import dtype_of
from easytorch.backends.errors import BackendError
from easytorch.backends.graph import Op
from easytorch.frontend.context import Context, Value
from easytorch.frontend.errors import LoweringError, UnsupportedOpError
from easytorch.frontend.registry import Lowering, lowerings


def lower_graph(graph: GraphModule, builder: Builder, arguments: Sequence[Value]) -> list[Value]:
    """The outputs of a functional ATen graph for `arguments`: ops of `builder`, ints for sizes, anything else as it is.

    An output is an op, or a number or None where the graph returns one.
    `UnsupportedOpError` for an operation without a lowering; errors of the builder say where in the module they arose.
    """
    return list(_run(graph, Context(builder, _run), arguments))


def _run(graph: GraphModule, context: Context, arguments: Sequence[Value]) -> Any:
    values: dict[Node, Value] = {}
    known = lowerings()
    given = iter(arguments)
    outer = context.node
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "get_attr":
            values[node] = _attribute(graph, node, context)
        elif node.op == "call_function":
            args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            context.node = node
            values[node] = _call(known.get(node.target), context, node, args, kwargs)
        elif node.op == "output":
            context.node = outer
            return torch.fx.node.map_arg(node.args[0], values.__getitem__)
        else:
            raise LoweringError(f"{node.format_node()}: no graph of torch.export has a {node.op}")
    raise LoweringError(f"{graph}: the graph has no output")


def _attribute(graph: GraphModule, node: Node, context: Context) -> Value:
    value: Any = graph
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return context.constant(value) if isinstance(value, torch.Tensor) else value


def _call(function: Lowering | None, context: Context, node: Node, args: Any, kwargs: Any) -> Value:
    target = node.target
    if function is not None:
        try:
            result = function(context, *args, **kwargs)
            _compare(node, result)
            return result
        except (BackendError, LoweringError) as error:
            error.add_note(f"while lowering {node.format_node()}{where(node)}")
            raise
    if not isinstance(target, torch._ops.OpOverload | torch._ops.HigherOrderOperator):
        # Arithmetic on sizes, and getitem of an operation with several outputs.
        if target is getattr and isinstance(args[0], Op):
            raise LoweringError(f"{node.format_node()}: attributes of tensors are not in a functional graph")
        return target(*args, **kwargs)  # type: ignore[operator]
    raise UnsupportedOpError(_unknown(node))


def _compare(node: Node, result: Value) -> None:
    """The result of a lowering must have the dtype that the graph states, and its sizes where they are known."""
    if isinstance(result, tuple | list):
        pairs = list(zip(result, node.meta.get("val") or (), strict=False))
    else:
        pairs = [(result, node.meta.get("val"))]
    for given, value in pairs:
        if not (isinstance(given, Op) and isinstance(value, torch.Tensor)):
            continue
        sizes = given.shape.dimensions
        fits = given.shape.dtype == dtype_of(value.dtype) and len(sizes) == value.dim()
        if not fits or any(isinstance(one, int) and one != size for one, size in zip(value.shape, sizes, strict=True)):
            raise LoweringError(
                f"{node.target}: its lowering gives {given.shape}, not {value.dtype} {list(value.shape)}"
            )


def _unknown(node: Node) -> str:
    data = [
        leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.SymInt | torch.SymFloat)
    ]
    if data:
        hint = "Its result is a number that depends on the data; a compiled program has its sizes fixed."
    else:
        hint = (
            f"Register a lowering before compiling: @easytorch.frontend.lowering(torch.ops.{node.target}) on a "
            "function (ctx, *args, **kwargs) that returns what ctx.builder gives."
        )
    return f"{node.target}: no lowering, and no decomposition into operations that have one.{where(node)}\n{hint}"


def where(node: Node) -> str:
    """The place in the user's module that a node comes from, if the graph records it."""
    modules = [name for name, *_ in node.meta.get("nn_module_stack", {}).values() if name]
    trace = str(node.meta.get("stack_trace") or "").strip().splitlines()
    parts = [f"\n  in the module {modules[-1]}"] if modules else []
    parts += [f"\n  {line.strip()}" for line in trace[-2:]]
    return "".join(parts)
