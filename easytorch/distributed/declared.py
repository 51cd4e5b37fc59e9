"""The sharding that a model declares for its weights: its plans of tensor and expert parallelism, as partition specs.

The plans are transformers', a table beside each model's config: module or parameter -> style. Our native classes and
transformers' own have them alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from easytorch.distributed.mesh import mesh_axis_sizes
from easytorch.distributed.rules import PartitionRules, specs_by_rules
from easytorch.distributed.specs import PartitionSpec, axis_names, entry

# The styles of a plan of expert parallelism: stacked weights, and the module that has them.
STACKED, DISPATCHED = "grouped_gemm", "ep_dispatch_experts"


class Declared(NamedTuple):
    """The spec of a parameter; parts: how many tensors its sharded dimension holds one after the other, each of which
    is sharded by itself (gate and up projection: 2)."""

    spec: PartitionSpec
    parts: int = 1


def declared_sharding(model: nn.Module) -> dict[str, Declared]:
    """Parameter name -> its sharding by the model's plans: axis "tp" by `tp_plan`, experts over "ep" by `ep_plan`."""
    found = {}
    stacked = {name: style for name, style in expanded_plan(model, "ep_plan").items() if style == STACKED}
    plans = {"tp": expanded_plan(model, "tp_plan"), "ep": stacked}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_axis = {axis: by_style(plan.get(name), parameter.ndim) for axis, plan in plans.items()}
        entries = [entry(axis for axis, (dim, _) in by_axis.items() if dim == index) for index in range(parameter.ndim)]
        found[name] = Declared(tuple(entries), max(parts for _, parts in by_axis.values()))
    return found


def partition_specs(
    model: nn.Module, partition_rules: PartitionRules | None = None, mesh: Any = None
) -> dict[str, PartitionSpec]:
    """Parameter name -> its partition spec, by the first rule that matches, else by the model's plans.

    mesh: axes that it lacks are dropped from the specs; its axis "fsdp" shards the first dimension of each parameter
    unless a rule names another. None keeps every axis, and adds none.
    """
    sizes = mesh_axis_sizes(mesh)
    specs = {name: declared.spec for name, declared in declared_sharding(model).items()}
    specs |= specs_by_rules(model, partition_rules, sizes)
    if mesh is None:
        return specs
    return {name: _on_mesh(spec, sizes) for name, spec in specs.items()}


def _on_mesh(spec: PartitionSpec, sizes: Iterable[str]) -> PartitionSpec:
    names = [[name for name in axis_names(axes) if name in sizes] for axes in spec]
    if names and "fsdp" in sizes and not any("fsdp" in one for one in names):
        names[0].append("fsdp")
    return tuple(map(entry, names))


def expanded_plan(model: nn.Module, kind: str) -> dict[str, str]:
    """Module or parameter name -> style, of every layer, by both names of a tied weight; empty where none is declared.

    kind: "tp_plan" or "ep_plan". A module's parameters stand before it, and weights in few bits, which are none.
    """
    plan = getattr(model, kind, None) or {}
    found: dict[str, str] = {}
    if not plan:
        return found
    for name, module in model.named_modules():
        own = plan.get(generic_name(name))
        for key in (*(key for key, _ in module.named_parameters(recurse=False)), *coded_weights(module)):
            full = f"{name}.{key}" if name else key
            if (style := plan.get(generic_name(full), own)) is not None:
                found[full] = style
        if own is not None:
            found[name] = own
    return found


def coded_weights(module: nn.Module) -> dict[str, Any]:
    """Name of a weight -> its `CodedWeight`, of a module whose weights are codes of few bits."""
    found: Any = getattr(module, "coded_weights", None)
    return {} if found is None else found()


def first_names(model: nn.Module) -> dict[str, str]:
    """Parameter name -> the first of the names that the weight has: one for most, two or more for a tied weight.

    `from_pretrained` makes a model on the meta device and ties its weights when they are loaded: they count as tied.
    """
    by_identity: dict[int, str] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found = {name: by_identity.setdefault(id(parameter), name) for name, parameter in parameters.items()}
    order = {name: place for place, name in enumerate(parameters)}
    to_tie: Any = getattr(model, "all_tied_weights_keys", None) or {}
    for target, source in to_tie.items():
        if target in found and source in found and parameters[target].is_meta:
            names = {found[target], found[source]}
            first = min(names, key=order.__getitem__)
            found.update({name: first for name, other in found.items() if other in names})
    return found


def by_style(style: str | None, ndim: int) -> tuple[int | None, int]:
    """(the dimension of a parameter that the style shards, its parts); (None, 1) where it is replicated."""
    if style is None:
        return None, 1
    if style.startswith("embedding_"):
        return (0 if style == "embedding_rowwise" else 1), 1
    if style == STACKED:
        return 0, 1
    parts = 2 if style.startswith("packed_") and ndim > 1 else 1
    if style.removeprefix("packed_").startswith("colwise"):
        return max(ndim - 2, 0), parts
    if style.removeprefix("packed_").startswith("rowwise"):
        return (None, 1) if ndim == 1 else (ndim - 1, parts)
    return None, 1


def generic_name(name: str) -> str:
    """`layers.*.mlp` for `layers.3.mlp`, as plans are keyed."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
