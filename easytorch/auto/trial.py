"""Whether a transformers class works with our attention: a small model of the class is run with both.

transformers accepts any registered attention name for any class, but a class may build masks of its own, combine them
with masks chosen by name, or compute attention itself: wrong results without an error. So what a class declares is not
trusted. A model of a few thousand weights is made from the config, and its outputs and gradients must equal those with
transformers' own attention under every kind of mask that the class accepts.
"""

from __future__ import annotations

import copy
import json
import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from easytorch.auto.cases import cases, tensors
from easytorch.auto.comparison import Tensors, difference, in_float64, is_rounding
from easytorch.auto.failures import FAILURES, first_line
from easytorch.auto.inputs import Inputs, working_inputs
from easytorch.auto.recognition import is_attention
from easytorch.auto.tiny import ATTEMPTS, configs_in, shrunken
from easytorch.layers.attention import OBSERVERS, OF_STOCK

ModelClass = type[PreTrainedModel]

MOST_WEIGHTS = (8_000_000, 30_000_000)  # the smaller limit is tried first


@dataclass
class Trial:
    """The result of a trial. plugged: the groups (`attention_groups`) that may use our attention; refusals: why not."""

    plugged: frozenset[str] = frozenset()
    refusals: dict[str, str] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)  # group -> its key in config.sub_configs, "" for the model's own

    @property
    def reason(self) -> str | None:
        return "; ".join(dict.fromkeys(self.refusals.values())) or None


@dataclass
class Group:
    """The modules that look up their attention's name in one config object."""

    config: PreTrainedConfig
    modules: list[nn.Module] = field(default_factory=list)

    def switch(self, name: str) -> None:
        self.config._attn_implementation_internal = name


def attention_groups(model: nn.Module) -> dict[str, Group]:
    """The config objects of `model`'s modules, by the name of the first module that has each."""
    groups: dict[int, tuple[str, Group]] = {}
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            groups.setdefault(id(config), (name, Group(config)))[1].modules.append(module)
    return dict(groups.values())


def _keys(model: PreTrainedModel) -> dict[str, str]:
    """Group -> the key of its config, or of the one it is inside; a copy of the model's own counts as the model's."""
    inside = {
        id(part): key
        for key in model.config.sub_configs
        if (inner := getattr(model.config, key, None)) is not None
        for part in configs_in(inner)
    }
    return {name: inside.get(id(group.config), "") for name, group in attention_groups(model).items()}


def try_attention(model_class: ModelClass, config: PreTrainedConfig) -> Trial:
    """The `Trial` of `model_class` under `config`; once a process for all configs that differ in sizes only."""
    key = (model_class, _structure(config))
    if key not in _TRIALS:
        with undisturbed():
            _TRIALS[key] = _try(model_class, config)
    return _TRIALS[key]


_TRIALS: dict[tuple[ModelClass, str], Trial] = {}


def _structure(config: PreTrainedConfig) -> str:
    return json.dumps(shrunken(config).to_dict(), sort_keys=True, default=repr)


def _try(model_class: ModelClass, config: PreTrainedConfig) -> Trial:
    name = model_class.__name__
    failures: list[str] = []
    for model in small_models(model_class, config, failures):
        if not has_attention(model):
            return Trial(refusals={"": f"{name} has no attention that could be replaced"})
        runs = list(_runs(model, failures))
        if runs:
            return replace(_compare(model, runs), keys=_keys(model))
    return Trial(refusals={"": f"{name} could not be tried with the EasyTorch attention ({failures[-1]})"})


def small_models(model_class: ModelClass, config: PreTrainedConfig, failures: list[str]) -> Iterator[PreTrainedModel]:
    """Models of `config` shrunk in several ways, smallest first; `failures` receives what could not be built.

    A model without attention stays on the meta device, since nothing is run.
    """
    larger, seen, unmade = [], set(), []
    for attempt in range(len(ATTEMPTS)):
        try:
            small = shrunken(config, attempt)
            described = json.dumps(small.to_dict(), default=repr)
            if described in seen:
                continue
            seen.add(described)
            with torch.device("meta"):
                outline = model_class._from_config(copy.deepcopy(small))
            if not has_attention(outline):
                yield outline
                return
            count = sum(weight.numel() for weight in outline.parameters())
            if count > MOST_WEIGHTS[0]:
                larger.append((count, attempt))
                continue
            model = build(model_class, small)
        except FAILURES as error:
            unmade.append(first_line(error))
            continue
        yield model
    for count, attempt in sorted(larger):
        if count > MOST_WEIGHTS[1]:
            unmade.append(f"{model_class.__name__} has {count} weights even when it is made small")
            break
        yield build(model_class, shrunken(config, attempt))
    failures.extend([*unmade[:1], *failures[:1]])  # a failed run is more informative than a failed build


def build(model_class: ModelClass, config: PreTrainedConfig) -> PreTrainedModel:
    """A model of `config` in float32 with weights large enough that attention matters."""
    model: PreTrainedModel = model_class._from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.is_floating_point() and weight.numel():
                scale = 1.0 if weight.ndim < 2 else weight[0].numel() ** -0.5
                weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.5 * scale)
    return model


@dataclass
class Run:
    """One model inside the model, what it is called with, and what transformers' own attention gives."""

    unit: PreTrainedModel
    case: str
    inputs: Inputs
    call: Callable[[], Any]
    expected: Tensors


def _runs(model: PreTrainedModel, failures: list[str]) -> Iterator[Run]:
    """Calls that work with transformers' own attention: of the model, and of submodels that it did not run."""
    run: set[nn.Module] = set()
    handles = [
        module.register_forward_pre_hook(lambda module, args: run.add(module))
        for module in model.modules()
        if is_attention(module)
    ]
    for unit in model.modules():
        if not isinstance(unit, PreTrainedModel) or (unit is not model and not _lacking(unit, run)):
            continue
        inputs, failure = working_inputs(unit)
        if inputs is None:
            if unit is model:
                failures.append(failure or "no inputs were found for it")
            continue
        for case, call in cases(unit, inputs):
            try:
                expected = _outputs(call)
            except FAILURES:
                continue
            yield Run(unit, case, inputs, call, expected)
    for handle in handles:
        handle.remove()


def _lacking(unit: nn.Module, run: set[nn.Module]) -> bool:
    return any(is_attention(module) and module not in run for module in unit.modules())


def _compare(model: PreTrainedModel, runs: list[Run]) -> Trial:
    groups = attention_groups(model)
    stock = {name: group.config._attn_implementation for name, group in groups.items()}
    ours = {name: OF_STOCK[found]["easytorch"] for name, found in stock.items() if found in OF_STOCK}
    run_models: set[nn.Module] = set()
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    for one in models:
        one.register_forward_pre_hook(lambda module, args: run_models.add(module))

    def switch(names: Iterable[str], attention: dict[str, str]) -> None:
        for name in names:
            groups[name].switch(attention[name])

    def differs(names: Collection[str]) -> tuple[str | None, set[nn.Module]]:
        """The first difference with our attention in the groups `names`, and the modules that called ours."""
        called: set[nn.Module] = set()
        switch(names, ours)
        OBSERVERS.append(called.add)
        try:
            for run in runs:
                reason = _difference(run, lambda: switch(names, stock), lambda: switch(names, ours))
                if reason is not None:
                    return reason, called
            return None, called
        finally:
            OBSERVERS.remove(called.add)
            switch(names, stock)

    reason, called = differs(ours)
    refusals: dict[str, str] = {}
    plugged, label = set(ours), type(model).__name__
    if not called:
        never = f"{label} computes attention by itself and never calls transformers' AttentionInterface"
        return Trial(refusals={"": never})
    if reason is not None:
        plugged = set()
        for name in ours:
            found, by_it = (reason, called) if len(ours) == 1 else differs([name])
            if found is not None:
                refusals[name] = f"{_label(model, name)} gives other numbers with the EasyTorch attention: {found}"
            elif by_it:
                plugged.add(name)
        reason, called = differs(plugged) if plugged else (None, set())
        if reason is not None:
            return Trial(refusals={"": f"{label} gives other numbers with the EasyTorch attention: {reason}"})
    # a model that another has passed over is not run by a user of that one either: OPTForCausalLM calls its decoder
    seen = {module for one in run_models for module in one.modules()}
    for name in plugged:
        idle = [module for module in groups[name].modules if module in models and module not in seen]
        if idle:  # what it does around the attention of others, with their masks say, was not seen
            refusals[name] = f"{type(idle[0]).__name__} could not be run when it was tried"
    used = {name for name in plugged if any(module in called for module in groups[name].modules)}
    for name in plugged - used:
        if any(is_attention(module) for module in groups[name].modules):
            refusals[name] = f"{_label(model, name)} did not call the EasyTorch attention when it was tried"
    return Trial(frozenset(plugged - set(refusals)), refusals)


def has_attention(model: nn.Module) -> bool:
    return any(map(is_attention, model.modules()))


def _label(model: nn.Module, name: str) -> str:
    return type(model.get_submodule(name)).__name__ + (f" ({name})" if name else "")


def _outputs(call: Callable[[], Any]) -> Tensors:
    torch.default_generator.manual_seed(0)
    with torch.no_grad():
        return [tensor.clone() for tensor in tensors(call())]


def _difference(run: Run, to_stock: Callable[[], None], to_ours: Callable[[], None]) -> str | None:
    """How the outputs of `run` with our attention, which is set now, differ from transformers'; None if they do not."""
    try:
        given = _outputs(run.call)
    except FAILURES as error:
        return f"{run.case}: {first_line(error)}"
    off = difference(given, run.expected)
    if off is None:
        return None
    with in_float64(run.unit, run.inputs) as inputs:
        call = dict(cases(run.unit, inputs))[run.case]
        try:
            exact = _outputs(call)
            to_stock()
            if is_rounding(given, run.expected, exact, _outputs(call)):
                return None
        except FAILURES:  # not every class computes in float64: what it gives in float32 stands
            pass
        finally:
            to_ours()
    return f"{run.case}: {off}"


@contextmanager
def undisturbed() -> Iterator[None]:
    """Restores random state, device, modes, warnings and logging after a trial."""
    dtype, level = torch.get_default_dtype(), logging.root.manager.disable
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        if torch.get_default_device().type != "cpu":  # a context looks at every call of torch, a tenth of a trial
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            logging.disable(level)
