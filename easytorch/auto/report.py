"""`model.easytorch_report`: what EasyTorch does in a model, and which attention layers used it in the first forward."""

from __future__ import annotations

import contextlib
import itertools
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from easytorch.auto.recognition import is_attention
from easytorch.layers.attention import OBSERVERS
from easytorch.protocol.foreign_calls import watch_calls
from easytorch.protocol.native import NativeModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModuleClass:
    """The modules of one class, replaced or not. operations: what they call now; reason: why they are unchanged, or
    beside operations why their rotation is."""

    kind: str
    name: str
    count: int
    operations: str | None = None
    reason: str | None = None

    def __str__(self) -> str:
        end = f"by {self.operations}" if self.operations else f"not replaced: {self.reason}"
        if self.operations and self.reason:
            end += f", the rotation not replaced: {self.reason}"
        return f"{self.count} x {self.name} ({self.kind}) {end}"


@dataclass
class Report:
    """How a model was loaded. `model.easytorch_report` is one, and so is what calling it returns.

    native: it is our own class. attention: its attention's name. reason: why that is not ours, if it is not. layers:
    its attention layers by name. called: those that called our attention in the first forward, None before it. modules:
    of transformers' own class, what became of its norms, feed-forward networks, rotary positions and experts.
    """

    model_class: str
    family: str
    native: bool
    attention: str
    reason: str | None
    layers: tuple[str, ...]
    called: tuple[str, ...] | None = None
    modules: tuple[ModuleClass, ...] = ()

    def __call__(self) -> Report:
        return self

    @property
    def not_replaced(self) -> tuple[str, ...]:
        """The attention layers that did not use our attention; before the first forward, those known not to."""
        called = (self.layers if self.reason is None else ()) if self.called is None else self.called
        return tuple(name for name in self.layers if name not in set(called))

    def __str__(self) -> str:
        kind = "native" if self.native else "transformers' own class"
        text = f"{self.family}: {self.model_class} is {kind}, attention {self.attention!r}"
        if self.reason is not None:
            text += f" ({self.reason})"
        if self.called is not None:
            text += f"; {len(self.called)} of {len(self.layers)} attention layers call the EasyTorch attention"
        return "; ".join((text, *map(str, self.modules)))


def report_on(
    model: PreTrainedModel, reason: str | None, modules: tuple[ModuleClass, ...] | None = None
) -> PreTrainedModel:
    """Attach a `Report`, log it, and count in the first forward. Returns `model`. modules: None keeps those known."""
    if modules is None:
        modules = getattr(getattr(model, "easytorch_report", None), "modules", ())
    layers = attention_layers(model)
    report = Report(
        model_class=type(model).__name__,
        family=model.config.model_type,
        native=isinstance(model, NativeModel),
        attention=model.config._attn_implementation,
        reason=reason,
        layers=tuple(layers),
        modules=modules,
    )
    model.easytorch_report = report  # type: ignore[assignment]
    logger.log(logging.INFO if reason is None else logging.WARNING, "%s", report)
    if not report.native:
        watch_calls(model)
    if layers:
        _FirstForward(model, report, layers)
    return model


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The innermost attention modules (`is_attention`), by module name."""
    named = {name: module for name, module in model.named_modules() if is_attention(module)}
    inner = {name.rpartition(".")[0] for name in named}
    outer = {parent for name in inner for parent in _and_parents(name)}
    return {name: module for name, module in named.items() if name not in outer}


def _and_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _around(model: nn.Module, names: tuple[str, ...]) -> nn.Module:
    """The smallest module that contains all the named ones, which runs under any head or adapter."""
    columns = zip(*(name.split(".") for name in names), strict=False)
    shared = [parts[0] for parts in itertools.takewhile(lambda parts: len(set(parts)) == 1, columns)]
    while isinstance(model.get_submodule(".".join(shared)), nn.ModuleList | nn.ModuleDict):
        shared.pop()
    return model.get_submodule(".".join(shared))


class _FirstForward:
    """Records, during the first forward, which attention layers call ours.

    It listens only while one of the layers runs: a forward that stops half way, or a layer called by itself, leaves
    nothing among `OBSERVERS`, which belong to the process.
    """

    def __init__(self, model: PreTrainedModel, report: Report, layers: dict[str, nn.Module]) -> None:
        self.model = model
        self.report = report
        self.names: dict[int, str] = {}
        self.entered = False
        self.seen: set[str] = set()
        # generate() runs an encoder before the model: recording starts with the first layer, wherever it is
        self.handles: list[RemovableHandle] = []
        for layer in layers.values():
            self.handles.append(layer.register_forward_pre_hook(self.enter))
            self.handles.append(layer.register_forward_hook(self.leave, always_call=True))
        self.handles.append(_around(model, tuple(layers)).register_forward_hook(self.finish, always_call=True))

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or self.observe in OBSERVERS:
            return
        if id(module) not in self.names:  # a copy of the model copies its hooks, and its layers are others
            self.names = {id(layer): name for name, layer in attention_layers(self.model).items()}
        self.entered = True
        OBSERVERS.append(self.observe)

    def observe(self, module: nn.Module) -> None:
        if id(module) in self.names:
            self.seen.add(self.names[id(module)])

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        with contextlib.suppress(ValueError):  # another thread may run this model's first forward too
            OBSERVERS.remove(self.observe)

    def finish(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        entered, self.entered = self.entered, False
        if not entered or output is None:  # nothing was recorded, or the forward failed: record the next one
            return
        for handle in self.handles:
            handle.remove()
        self.report.called = tuple(name for name in self.report.layers if name in self.seen)
        lacking = len(self.report.called) < len(self.report.layers)
        logger.log(logging.WARNING if lacking else logging.INFO, "%s", self.report)
