"""The graph of a train step on a builder: which tensors it takes and returns, and how they are divided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from easytorch.backends.builder import Builder
from easytorch.backends.dtypes import dtype_of
from easytorch.backends.graph import Graph, Op
from easytorch.backends.interface import Backend
from easytorch.backends.partitioning import Sharding
from easytorch.backends.shapes import Shape
from easytorch.frontend.errors import LoweringError
from easytorch.frontend.lower import lower_graph
from easytorch.frontend.step_layout import Layout
from easytorch.frontend.step_trace import StepSpec, trace


@dataclass(frozen=True)
class StepGraph:
    """A step for batches of one set of sizes. Parameters are the state (trained, slots, fixed), the numbers of the
    optimizer, and the batch; outputs the state that changes, the loss and the norm of the gradients.

    changed: the places, in the state, of the outputs. batch: the shardings of the batch's tensors.
    """

    builder: Builder
    outputs: list[Op]
    shardings: list[Sharding] | None
    changed: list[int]
    batch: list[Sharding]

    def finish(self) -> Graph:
        """The computation, not compiled."""
        return self.builder.finish(*self.outputs, shardings=self.shardings)


def spec_of(model: nn.Module, optimizer: torch.optim.Optimizer, layout: Layout | None, **settings: Any) -> StepSpec:
    """The parts of a step; `ValueError` for an optimizer of other parameters than the model's."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in names:
                raise ValueError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the model's; "
                    "make it of model.parameters()"
                )
            groups[names[parameter]] = number
    trained = {name: one for one, name in names.items() if one.requires_grad and name in groups}
    if not trained:
        raise ValueError("nothing to train: no parameter of the optimizer requires gradients")
    fixed: dict[str, Tensor] = {name: one for one, name in names.items() if name not in trained}
    fixed |= dict(model.named_buffers())
    return StepSpec(
        model, optimizer, trained=trained, fixed=fixed, groups=groups,
        gathered={} if layout is None else layout.gathered(), stored={} if layout is None else layout.weights,
        **settings,
    )  # fmt: skip


def build(
    spec: StepSpec,
    backend: Backend,
    layout: Layout | None,
    leaves: Sequence[Any],
    structure: pytree.TreeSpec,
    names: Sequence[str],
) -> StepGraph:
    """The step for a batch of these sizes. names: of the leaves."""
    graph = trace(spec, leaves, structure)
    builder = backend.builder("train_step")
    if layout is not None:
        builder.distributed_auto_sharding(layout.axes)
    tensors = [(name, leaf) for name, leaf in zip(names, leaves, strict=True) if isinstance(leaf, Tensor)]
    batch = [() if layout is None else layout.batch(leaf, name) for name, leaf in tensors]
    state = state_shardings(spec, layout)
    shardings = [*state, (), *batch]
    placeholders = graph.graph.find_nodes(op="placeholder")
    arguments = [
        builder.parameter(node.name, _shape(node.meta["val"]), None if layout is None else sharding)
        for node, sharding in zip(placeholders, shardings, strict=True)
    ]
    returned = _outputs(graph)
    values = lower_graph(graph, builder, arguments)
    changed = [place for place, node in enumerate(returned[: len(state)]) if node is not placeholders[place]]
    outputs = [values[place] for place in (*changed, len(state), len(state) + 1)]
    of_outputs = None if layout is None else [*(state[place] for place in changed), (), ()]
    return StepGraph(builder, outputs, of_outputs, changed, batch)


def state_shardings(spec: StepSpec, layout: Layout | None) -> list[Sharding]:
    """Of trained parameters, slots and fixed tensors; buffers are on every device."""
    weights: Mapping[str, Sharding] = {} if layout is None else layout.weights
    names = [*spec.trained, *(name for name, _ in spec.slots), *spec.fixed]
    return [weights.get(name, ()) for name in names]


def _shape(value: Any) -> Shape:
    if not isinstance(value, Tensor):
        raise LoweringError(f"a train step takes tensors, not {value!r}")
    return Shape(dtype_of(value.dtype), tuple(int(size) for size in value.shape))


def _outputs(graph: GraphModule) -> list[Any]:
    found: list[Any] = list(graph.graph.output_node().args[0])  # type: ignore[arg-type]
    return found
