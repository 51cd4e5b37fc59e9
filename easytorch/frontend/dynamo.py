"""`torch.compile(model, backend="easytorch", options={"backend": "xla"})`.

Dynamo splits the program into guarded graphs, AOTAutograd makes each functional and, where gradients are needed,
a forward and a backward; `GraphProgram` runs them. Only operations without a lowering are decomposed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext
from torch.fx import GraphModule

from easytorch.frontend.compile_options import NAME, OPTIONS
from easytorch.frontend.decompositions import decompositions
from easytorch.frontend.graph_program import GraphProgram
from easytorch.frontend.routing import backend_for


def easytorch(graph: GraphModule, example_inputs: Sequence[Any], **given: Any) -> Callable[..., Any]:
    """One graph of dynamo's, compiled.

    options: `{"backend": ...}`, a configuration as of `backends.new` or a backend; "xla" without.
    `ValueError` for other options, and for a `mode`, which is inductor's.
    """
    options = dict(given.pop("options", None) or {})
    if given or set(options) - set(OPTIONS):
        unknown = [*given, *(set(options) - set(OPTIONS))]
        raise ValueError(f"torch.compile(backend={NAME!r}) knows the options {', '.join(OPTIONS)}, not {unknown}")
    asked = options.get("backend", "xla")

    def inference(inner: GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
        return _boxed(GraphProgram(inner, backend_for(inner, asked), "inference", visible=len(_outputs(inner))))

    def forward(inner: GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
        return _boxed(GraphProgram(inner, backend_for(inner, asked), "forward", visible=_results(inner)))

    def backward(inner: GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
        return _boxed(GraphProgram(inner, backend_for(inner, asked), "backward", visible=len(_outputs(inner))))

    return aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=decompositions(),
    )(graph, example_inputs)


def _boxed(program: GraphProgram) -> Callable[[list[Any]], list[Any]]:
    """The program as a function that is called with one list: AOTAutograd asks for this attribute, and dynamo copies
    it from functions only."""

    def run(arguments: list[Any]) -> list[Any]:
        return program(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _outputs(graph: GraphModule) -> Sequence[Any]:
    return graph.graph.output_node().args[0]  # type: ignore[return-value]


def _results(graph: GraphModule) -> int:
    """How many outputs of a forward are the caller's (results, new values of inputs): those saved for the backward
    follow."""
    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    return len(_outputs(graph)) if metadata is None else metadata.num_forward
