"""The modules of one loaded model get our operations, where a trial of their class shows the same numbers.

Norms, feed-forward networks, rotary positions and experts of transformers' own classes; attention is `trial.py`'s. A
class is tried once a process for each way that its instances are made, on a small copy of one of them. What is not
recognised, or gives other numbers, stays as it is, with the reason in the report.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from easytorch.auto import recognition
from easytorch.auto.failures import FAILURES, first_line
from easytorch.auto.miniature import miniature
from easytorch.auto.module_trial import disagreement, distance_in_half
from easytorch.auto.report import ModuleClass
from easytorch.auto.trial import undisturbed
from easytorch.function_globals import global_of
from easytorch.layers.experts import OURS as EXPERTS
from easytorch.layers.specialised import How, Norm, Specialised, StockAttention, specialise, turning


@dataclass
class Verdict:
    """The result of a trial: `how`, or the reason why not; both where a part is as it was."""

    how: How | None = None
    reason: str | None = None


@dataclass
class _Found:
    modules: list[nn.Module] = field(default_factory=list)
    verdict: Verdict = field(default_factory=Verdict)


def specialise_modules(model: PreTrainedModel, experts: object = None) -> tuple[ModuleClass, ...]:
    """Specialise what can be in `model`, and in no other of its class.

    experts: the `experts_implementation` that was asked for; `ValueError` where ours was and gives other numbers.
    """
    found: dict[tuple[str, str], _Found] = {}
    with undisturbed():
        for module in model.modules():
            options = [] if isinstance(module, Specialised) else recognition.candidates(module)
            if not options and not _unknown_norm(module):
                continue
            verdict = try_module(module, options)
            label = recognition.kind(verdict.how or options[0]) if options else "norm"
            one = found.setdefault((type(module).__name__, f"{label}{verdict}"), _Found(verdict=verdict))
            one.modules.append(module)
        switched = _specialise_experts(model, experts)
    rows = []
    for (name, _), one in found.items():
        how = one.verdict.how
        label = recognition.kind(how or next(iter(recognition.candidates(one.modules[0])), Norm("", "")))
        for module in one.modules if how is not None else ():
            specialise(module, how)  # type: ignore[arg-type]
        operations = None if how is None else recognition.operations(how)
        rows.append(ModuleClass(label, name, len(one.modules), operations, one.verdict.reason))
    return (*rows, *switched)


def _unknown_norm(module: nn.Module) -> bool:
    """Norms that are nothing we know are named in the report; torch's own are fused already."""
    return (
        recognition.is_norm(module)
        and not isinstance(module, nn.LayerNorm | Specialised)
        and not (type(module).__module__.startswith("torch."))
    )


_VERDICTS: dict[tuple[type[nn.Module], str, tuple[How, ...]], Verdict] = {}


def try_module(module: nn.Module, options: list[How]) -> Verdict:
    """The first of `options` that gives what the module gives; once for all instances that are made alike."""
    # the options too: an attention whose projections have adapters has others than one without
    key = (type(module), _structure(module), tuple(options))
    if key not in _VERDICTS:
        _VERDICTS[key] = _try(module, options)
    return _VERDICTS[key]


def _structure(module: nn.Module) -> str:
    """A key that groups instances of a class: attributes other than widths, submodules, ranks of parameters."""
    widths = {size for weight in module.parameters() for size in weight.shape}
    parts: list[Any] = []
    for name, part in module.named_modules():
        plain = {
            key: "width" if type(value) is int and value in widths else value
            for key, value in vars(part).items()
            if isinstance(value, str | int | float | bool | None) and key not in ("training", "layer_idx")
        }
        ranks = {key: None if one is None else one.dim() for key, one in part._parameters.items()}
        shaped = (part.in_features, part.out_features) if type(part) is nn.Linear else ()
        parts.append((name, type(part).__qualname__, sorted(plain.items(), key=repr), sorted(ranks.items()), shaped))
    return json.dumps(parts if _tried_whole(module) else parts[:1], default=repr)


def _tried_whole(module: nn.Module) -> bool:
    """False for an attention, of which a function alone is tried."""
    return "attention" not in type(module).__name__.lower()


def _try(module: nn.Module, options: list[How]) -> Verdict:
    if not options:
        return Verdict(reason="it is made of other parts than the norms that are known")
    if isinstance(options[0], StockAttention):
        return _try_attention(module, options)
    if any(not weight.is_floating_point() for weight in module.parameters()):
        return Verdict(reason="its weights are no floating numbers")
    try:
        stock = miniature(module, seed=3)
        inputs = [_features(stock)]
        copies = {how: _with(stock, how) for how in options}
    except FAILURES as error:
        return Verdict(reason=first_line(error))
    ordered = sorted(options, key=lambda how: distance_in_half(stock, copies[how], inputs))
    reasons = []
    for how in ordered:
        reason = disagreement(stock, copies[how], inputs) or _follows_eps(stock, copies[how], how, inputs)
        if reason is None:
            return Verdict(how)
        reasons.append(reason)
    return Verdict(reason=reasons[0])


def _with(stock: nn.Module, how: How) -> nn.Module:
    made = copy.deepcopy(stock)
    specialise(made, how)
    return made


def _features(stock: nn.Module) -> torch.Tensor:
    """Rows for a module: usual ones, one of zeros, a large and a small one."""
    first = next((child for child in stock.modules() if isinstance(child, nn.Linear)), None)
    weight = next(stock.parameters(), torch.empty(256))
    width = weight.shape[-1] if first is None else _inputs_of(stock)
    rows = torch.randn(2, 5, width, generator=torch.Generator().manual_seed(4))
    rows[0, 1], rows[0, 2], rows[1, 0] = 0.0, rows[0, 2] * 30.0, rows[1, 0] * 1e-3
    return rows


def _inputs_of(stock: nn.Module) -> int:
    """The width of a feed-forward network's input: the one that is a width of inputs and of outputs at its ends."""
    linears = [child for child in stock.children() if isinstance(child, nn.Linear)]
    inputs, outputs = ([getattr(one, name) for one in linears] for name in ("in_features", "out_features"))
    return (
        max(set(inputs), key=lambda width: (inputs.count(width), width in outputs))
        if len(linears) > 2
        else (linears[0].in_features if linears[0].out_features >= linears[1].in_features else linears[1].in_features)
    )


def _follows_eps(stock: nn.Module, ours: nn.Module, how: How, inputs: list[torch.Tensor]) -> str | None:
    """Another eps changes both alike: it is the one that is read."""
    if not isinstance(how, Norm):
        return None
    before = getattr(stock, how.eps)
    for one in (stock, ours):
        setattr(one, how.eps, 0.3)
    reason = disagreement(stock, ours, inputs)
    for one in (stock, ours):
        setattr(one, how.eps, before)
    return None if reason is None else f"with another eps {reason}"


class _Turns(nn.Module):
    """A function of query, key, cos and sin as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)


# a function, and whether it is tried as a partial one: how it differs, None where it does not
_TURNED: dict[tuple[Callable[..., Any], bool], str | None] = {}


def _try_attention(module: nn.Module, options: list[How]) -> Verdict:
    """Of an attention its rotation is tried: `linear` gives what a layer gives."""
    reason = None
    for how in options:
        assert isinstance(how, StockAttention)
        if how.function is None:
            return Verdict(how, reason)
        function = global_of(type(module).forward, how.function)
        key = (function, how.partial)
        if key not in _TURNED:
            _TURNED[key] = _rotary_disagreement(*key)
        if _TURNED[key] is None:
            return Verdict(how)
        reason = _TURNED[key]
    return Verdict(reason=reason)


def _rotary_disagreement(function: Callable[..., Any], partial: bool) -> str | None:
    generator = torch.Generator().manual_seed(5)
    query, key = (torch.randn(2, 7, heads, 64, generator=generator).transpose(1, 2) for heads in (4, 2))
    ours = turning(function, partial)
    for turned in (64, 32) if partial else (64,):
        for rows in (1, 2):
            angles = torch.randn(rows, 7, turned // 2, generator=generator).repeat(1, 1, 2)
            inputs = [query, key, angles.cos(), angles.sin()]
            reason = disagreement(_Turns(function), _Turns(ours), inputs)
            if reason is not None:
                return reason
    return None


def _specialise_experts(model: PreTrainedModel, asked: object) -> list[ModuleClass]:
    """Switch the configs of experts, which transformers asks at each call, to ours."""
    groups: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig) and hasattr(module, "_is_expert_parallel"):
            groups.setdefault(id(config), []).append(module)
    rows = []
    for modules in groups.values():
        named: Any = modules[0].config
        other = None if asked in (None, EXPERTS) else f"experts_implementation={asked!r} was asked for"
        reason = other or next(filter(None, map(_try_experts, modules)), None)
        if reason is None:
            named._experts_implementation_internal = EXPERTS
        elif asked == EXPERTS:
            raise ValueError(
                f"experts_implementation={asked!r} cannot be obeyed: {type(modules[0]).__name__} {reason}; leave it out"
            )
        operations = None if reason else "grouped_matmul"
        rows.append(ModuleClass("experts", type(modules[0]).__name__, len(modules), operations, reason))
    return rows


def _try_experts(module: nn.Module) -> str | None:
    """None where transformers' own loop over experts gives what ours gives."""
    key = (type(module), _structure(module), ())
    if key not in _VERDICTS:
        _VERDICTS[key] = Verdict(reason=_experts_disagreement(module))
    return _VERDICTS[key].reason


def _experts_disagreement(module: nn.Module) -> str | None:
    if any(not weight.is_floating_point() for weight in module.parameters()):
        return "its weights are no floating numbers"
    try:
        stock: Any = miniature(module, seed=3)
        ours: Any = copy.deepcopy(stock)
        for one, name in ((stock, "eager"), (ours, EXPERTS)):
            one.config = copy.copy(module.config)
            one.config._experts_implementation_internal = name
        count, hidden = stock.num_experts, stock.down_proj.shape[-1 if stock.is_transposed else -2]
        generator = torch.Generator().manual_seed(6)
        for tokens, a_token in ((9, min(2, count)), (1, min(2, count))):
            rows = torch.randn(tokens, hidden, generator=generator)
            chosen = torch.rand(tokens, count, generator=generator).topk(a_token, dim=-1)
            reason = disagreement(stock, ours, [rows, chosen.indices, chosen.values])
            if reason is not None:
                return reason
    except FAILURES as error:
        return first_line(error)
    return None
