"""A graph as one generated Python function of tensors, one line per operation.

Straight-line code is the fastest interpreter there is for a fixed sequence of calls, and what torch.compile reads best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from easytorch.backends import torch_views
from easytorch.backends.aten.node_context import Kernel, NodeContext
from easytorch.backends.aten.ops.collectives import COLLECTIVE
from easytorch.backends.aten.ops.movement import dynamic_update_in_place
from easytorch.backends.aten.ops.sorting import bind_sort, is_pointwise
from easytorch.backends.aten.ops.table import BINDERS
from easytorch.backends.aten.ops.windows import bind_select_and_scatter
from easytorch.backends.aten.outputs import ownership, updated_in_place
from easytorch.backends.aten.storage_dtypes import has_storage_dtype, storage_dtype
from easytorch.backends.dtypes import dtype_of
from easytorch.backends.graph import Graph, Node, Op
from easytorch.backends.interpreter import needed_nodes
from easytorch.backends.types import OpType

# Their kernels are functions of a graph, which give tuples.
_FUNCTIONS = frozenset({OpType.CALL, OpType.WHILE_LOOP, OpType.COND, OpType.SORT})
# Fewer operations than this between data-dependent ones are not worth the seconds that torch.compile takes.
_FEW = 3
# Tensors to a tuple of tensors.
Function = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Target:
    """A graph's device, and how it runs. compile: use torch.compile for parts without data-dependent control flow."""

    device: torch.device
    compile: bool = False
    traced: bool = False


@dataclass(frozen=True, slots=True)
class _Step:
    kernel: Kernel
    inputs: tuple[Op, ...]
    outputs: tuple[Op, ...]
    # Whether the kernel gives a tuple: also of one output, if it is itself a function written here.
    several: bool


def constant_on(device: torch.device, array: np.ndarray) -> Tensor:
    """A constant in its storage dtype."""
    tensor = torch_views.to_torch(array).to(device)
    dtype = dtype_of(array.dtype)
    return tensor.view(storage_dtype(dtype)) if has_storage_dtype(dtype) else tensor


def lower(graph: Graph, target: Target, writable: frozenset[int] = frozenset()) -> Function:
    """The function of the parameters that gives the outputs, all of them in their storage dtypes (storage_dtypes.py).

    writable: the numbers of the parameters in whose memory it may write.
    """
    nodes = needed_nodes(graph)
    constants = {
        Op(node): constant_on(target.device, node.attributes["value"])
        for node in nodes
        if node.op_type is OpType.CONSTANT
    }
    nodes = [node for node in nodes if node.op_type not in (OpType.PARAMETER, OpType.CONSTANT)]
    if not target.compile:
        in_place = set() if target.traced else updated_in_place(graph, nodes, writable)
        steps = [
            _step(
                node,
                dynamic_update_in_place(NodeContext(node, target.device)) if node in in_place else bind(node, target),
            )
            for node in nodes
        ]
    else:
        steps = _compiled_steps(graph, nodes, constants, target)
    return _written(graph.name, graph.parameters, graph.outputs, steps, constants)


def bind(node: Node, target: Target) -> Kernel:
    """The function of the operands of one operation; collectives are those of one device alone."""
    attributes = node.attributes
    if node.op_type is OpType.CALL:
        return lower(attributes["function"], target)
    if node.op_type is OpType.COND:
        branches = lower(attributes["true_branch"], target), lower(attributes["false_branch"], target)
        return _cond(*branches, len(attributes["true_branch"].captures))
    if node.op_type is OpType.WHILE_LOOP:
        return _loop(node, target)
    if node.op_type is OpType.SORT:
        comparator = attributes["comparator"]
        compare = lower(comparator, Target(target.device, traced=target.traced))
        return bind_sort(comparator, compare, len(node.shapes), attributes["axis"], traced=target.traced)
    if node.op_type is OpType.SELECT_AND_SCATTER:
        context = NodeContext(node, target.device, target.traced)
        inner = Target(target.device, traced=target.traced)
        return bind_select_and_scatter(context, lower(attributes["select"], inner), lower(attributes["scatter"], inner))
    if node.op_type in COLLECTIVE:
        together = COLLECTIVE[node.op_type](node)
        return lambda x: together([x])[0]
    return BINDERS[node.op_type](NodeContext(node, target.device, target.traced))


def _cond(first: Function, second: Function, count: int) -> Kernel:
    def cond(pred: Tensor, *captures: Tensor) -> tuple[Tensor, ...]:
        return first(*captures[:count]) if pred else second(*captures[count:])

    return cond


def _loop(node: Node, target: Target) -> Kernel:
    cond, body = node.attributes["cond"], node.attributes["body"]
    count, test_count = len(node.shapes), len(cond.captures)
    test, first = lower(cond, target), lower(body, target)
    # After the first round the state is the loop's own, and may be written to.
    own = ownership(body).own
    again = lower(body, target, own) if own and not target.compile else first

    def loop(*operands: Tensor) -> tuple[Tensor, ...]:
        state = operands[:count]
        test_captures, step_captures = operands[count : count + test_count], operands[count + test_count :]
        del operands
        step = first
        while test(*state, *test_captures)[0]:
            state, step = step(*state, *step_captures), again
        return state

    return loop


def _decides(node: Node) -> bool:
    """Whether an operation has data-dependent control flow, which torch.compile cannot trace."""
    if node.op_type in (OpType.WHILE_LOOP, OpType.COND):
        return True
    if node.op_type is OpType.SORT:
        return not is_pointwise(node.attributes["comparator"])
    return node.op_type is OpType.CALL and any(map(_decides, node.attributes["function"].nodes))


def _compiled_steps(graph: Graph, nodes: Sequence[Node], constants: dict[Op, Tensor], target: Target) -> list[_Step]:
    """One step for each run of operations without data-dependent control flow, compiled by torch.compile."""
    stretches: list[list[Node]] = [[]]
    for node in nodes:
        if _decides(node):
            stretches += [[node], []]
        else:
            stretches[-1].append(node)
    traced = Target(target.device, traced=True)
    wanted = {*graph.outputs}
    steps: list[_Step] = []
    for stretch in reversed(stretches):
        if not stretch:
            continue
        if _decides(stretch[0]):
            steps.append(_step(stretch[0], bind(stretch[0], target)))
        elif len(stretch) <= _FEW and (graph.parent is not None or len(stretches) > 1):
            steps += [_step(node, bind(node, Target(target.device))) for node in reversed(stretch)]
        else:
            made = [op for node in stretch for op in _outputs(node)]
            given = {op for node in stretch for op in node.inputs} - {*made, *constants}
            inputs = tuple(sorted(given, key=_place))
            outputs = tuple(op for op in made if op in wanted)
            inner = [_step(node, bind(node, traced)) for node in stretch]
            used = {op: constants[op] for node in stretch for op in node.inputs if op in constants}
            function = _written(graph.name, inputs, outputs, inner, used)
            steps.append(_Step(_compiled(function, inputs, target.device), inputs, outputs, several=True))
        wanted.update(op for node in stretch for op in node.inputs)
    return steps[::-1]


def _place(op: Op) -> tuple[int, int]:
    return op.node.number, op.output


def _compiled(function: Function, inputs: Sequence[Op], device: torch.device) -> Function:
    """`function` by torch.compile, traced to ATen first, so that no guards on our closures are checked at each call."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    with FakeTensorMode(allow_non_fake_inputs=True):
        examples = [
            torch.empty(op.shape.dimensions, dtype=storage_dtype(op.shape.dtype), device=device) for op in inputs
        ]
        module = make_fx(function, _allow_non_fake_inputs=True)(*examples)
    compiled: Function = torch.compile(module, fullgraph=True, dynamic=False)
    return compiled


def _step(node: Node, kernel: Kernel) -> _Step:
    return _Step(kernel, node.inputs, _outputs(node), several=len(node.shapes) > 1 or node.op_type in _FUNCTIONS)


def _outputs(node: Node) -> tuple[Op, ...]:
    return tuple(Op(node, number) for number in range(len(node.shapes)))


def _written(
    name: str, parameters: Sequence[Op], outputs: Sequence[Op], steps: Sequence[_Step], constants: dict[Op, Tensor]
) -> Function:
    """The function whose source has a line for each step; values are deleted after their last use."""
    names: dict[Op, str] = {op: f"c{number}" for number, op in enumerate(constants)}
    names.update((op, f"p{number}") for number, op in enumerate(parameters))
    scope: dict[str, Any] = {names[op]: value for op, value in constants.items()}
    for number, step in enumerate(steps):
        scope[f"k{number}"] = step.kernel
        names.update((op, f"v{number}_{place}") for place, op in enumerate(step.outputs))
    last = {op: number for number, step in enumerate(steps) for op in (*step.outputs, *step.inputs)}
    kept = {*outputs, *constants}
    lines = [f"def run({', '.join(names[op] for op in parameters)}):"]
    for number, step in enumerate(steps):
        targets = f"[{', '.join(names[op] for op in step.outputs)}]" if step.several else names[step.outputs[0]]
        lines.append(f"    {targets} = k{number}({', '.join(names[op] for op in step.inputs)})")
        dead = [
            names[op] for op in dict.fromkeys((*step.inputs, *step.outputs)) if last[op] == number and op not in kept
        ]
        if dead:
            lines.append(f"    del {', '.join(dead)}")
    lines.append(f"    return ({''.join(f'{names[op]}, ' for op in outputs)})")
    exec(compile("\n".join(lines), f"<{name}>", "exec"), scope)
    run: Function = scope["run"]
    return run
