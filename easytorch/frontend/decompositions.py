"""torch's decompositions, only for operations without a lowering.

The default table of torch.export decomposes linear, layer_norm and attention, which backends compute better fused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.export import default_decompositions
from torch.fx import GraphModule

from easytorch.frontend.registry import lowerings

Decompositions = dict[Any, Callable[..., Any]]


def decompositions() -> Decompositions:
    """Those of every operation, for a graph that is traced anew.

    Views without a default decomposition are left to functionalization: such a graph is traced with fake tensors, on
    which the decompositions of `lift_fresh` and `alias` meet a real constant.
    """
    default = default_decompositions()
    return _where(lambda target: target in default or not _is_view(target))


def decompositions_in(modules: Iterable[torch.nn.Module]) -> Decompositions:
    """Those of the operations in the graphs. Operations that write in place are left to functionalization."""
    targets = {
        node.target
        for module in modules
        if isinstance(module, GraphModule)
        for node in module.graph.nodes
        if node.op == "call_function"
    }
    return _where(lambda target: target in targets and not target._schema.is_mutable)


def _where(kept: Callable[[torch._ops.OpOverload], bool]) -> Decompositions:
    """torch's decompositions of the operations without a lowering of which `kept` is true."""
    lowered = lowerings()
    return {
        target: function
        for target, function in {**decomposition_table, **default_decompositions()}.items()
        if isinstance(target, torch._ops.OpOverload) and target not in lowered and kept(target)
    }


def _is_view(target: torch._ops.OpOverload) -> bool:
    return any(result.alias_info is not None for result in target._schema.returns)
