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
    table = {target: function for target, function in decomposition_table.items() if not _is_view(target)}
    return _without_lowering({**table, **default_decompositions()})


def decompositions_in(modules: Iterable[torch.nn.Module]) -> Decompositions:
    """Those of the operations in the graphs. Operations that write in place are left to functionalization."""
    targets = {
        node.target
        for module in modules
        if isinstance(module, GraphModule)
        for node in module.graph.nodes
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
    }
    table = _without_lowering({**decomposition_table, **default_decompositions()})
    return {target: table[target] for target in targets if target in table and not target._schema.is_mutable}


def _without_lowering(table: Decompositions) -> Decompositions:
    lowered = lowerings()
    return {
        target: function
        for target, function in table.items()
        if isinstance(target, torch._ops.OpOverload) and target not in lowered
    }


def _is_view(target: Any) -> bool:
    returns = target._schema.returns if isinstance(target, torch._ops.OpOverload) else ()
    return any(result.alias_info is not None for result in returns)
