"""Which of our operations a module of transformers' might be: candidates by what it is made of, not by its name.

A candidate is only a guess; `specialising.py` tries it before it is used.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator

from torch import nn

from easytorch.function_globals import called_of_self, global_of, remakable
from easytorch.layers.specialised import FORMULAS, MLP, GatedMLP, How, Norm, StockAttention

ROTARY = "apply_rotary_pos_emb"


def candidates(module: nn.Module) -> list[How]:
    """Our layers that might replace the module; empty for a kind without an operation of ours."""
    if type(module).__module__.startswith("torch."):
        return []
    if is_attention(module):
        return list(_attention(module))
    if len(inspect.signature(type(module).forward).parameters) != 2:  # a gate, a residual: more than we compute
        return []
    if not module._modules:
        return list(_norms(module))
    return list(_feed_forward(module))


def is_attention(module: nn.Module) -> bool:
    """By its class's name or a base's, or because its forward looks up transformers' attention functions."""
    return any(map(_says_attention, (found for found in type(module).__mro__ if issubclass(found, nn.Module))))


def _says_attention(found: type[nn.Module]) -> bool:
    code = getattr(inspect.unwrap(found.forward), "__code__", None)
    return "attention" in found.__name__.lower() or (code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names)


def kind(how: How) -> str:
    """As reports call it."""
    if isinstance(how, StockAttention):
        return "projections" if how.function is None else "rotary"
    return {Norm: "norm", GatedMLP: "gated MLP", MLP: "MLP"}[type(how)]


def operations(how: How) -> str:
    """The names of the operations that its forward calls, for reports."""
    if isinstance(how, Norm):
        return how.formula
    if isinstance(how, StockAttention):
        products = f"linear ({', '.join(how.projections)})" if how.projections else ""
        return ", ".join(filter(None, ("rotary" if how.function else "", products)))
    return {GatedMLP: "linear, swiglu or geglu", MLP: "linear"}[type(how)]


def is_norm(module: nn.Module) -> bool:
    """By its name: a module without weights says nothing else of itself."""
    return "norm" in type(module).__name__.lower() and not module._modules


def _norms(module: nn.Module) -> Iterator[How]:
    weights = {name: weight for name, weight in module._parameters.items() if weight is not None}
    if (
        not is_norm(module)
        or module._buffers
        or isinstance(module, nn.LayerNorm | nn.GroupNorm | nn.modules.batchnorm._NormBase)
    ):
        return
    if not weights.keys() <= {"weight", "bias"} or any(weight.dim() != 1 for weight in weights.values()):
        return
    named = [name for name, value in vars(module).items() if type(value) is float and "eps" in name]
    if len(named) != 1:
        return
    for formula in FORMULAS:
        if ("bias" in weights and formula != "layer_norm") or (not weights and "zero-centred" in formula):
            continue
        yield Norm(formula, named[0])


def _feed_forward(module: nn.Module) -> Iterator[How]:
    children = {name: child for name, child in module._modules.items() if child is not None}
    linears = {name: child for name, child in children.items() if type(child) is nn.Linear}
    dropouts = tuple(name for name, child in children.items() if type(child) is nn.Dropout)
    acts = [name for name in children if name not in linears and name not in dropouts]
    if module._parameters or module._buffers or len(acts) > 1 or any(not _is_plain(children[name]) for name in acts):
        return
    act = acts[0] if acts else None
    if len(linears) == 3:
        for down, last in linears.items():
            rest = [name for name in linears if name != down]
            first, second = (linears[name] for name in rest)
            if (first.in_features, first.out_features) != (second.in_features, second.out_features):
                continue
            if (last.in_features, last.out_features) == (first.out_features, first.in_features):
                yield from (GatedMLP(gate, up, down, act, dropouts) for gate, up in (rest, rest[::-1]))
    if len(linears) == 2:
        for up, down in (tuple(linears), tuple(linears)[::-1]):
            rows, columns = linears[up].out_features, linears[down].in_features
            if rows == 2 * columns:
                yield from (GatedMLP(up, None, down, act, dropouts, first) for first in (True, False))
            elif rows == columns and act is not None and linears[down].out_features == linears[up].in_features:
                yield MLP(up, down, act, dropouts)


def _is_plain(child: nn.Module) -> bool:
    """An activation: no children, no weights."""
    return not (child._modules or child._parameters or child._buffers) or not any(True for _ in child.parameters())


def _attention(module: nn.Module) -> Iterator[How]:
    forward = type(module).forward
    linears = {name for name, child in module._modules.items() if isinstance(child, nn.Linear)}
    projections = tuple(sorted(linears & called_of_self(forward))) if remakable(forward) else ()
    if isinstance(global_of(forward, ROTARY), types.FunctionType):
        yield from (StockAttention(ROTARY, partial, projections) for partial in (True, False))
    if projections:
        yield StockAttention(None, False, projections)
