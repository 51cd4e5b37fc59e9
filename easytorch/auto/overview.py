"""How EasyTorch runs an architecture: its classes, native or transformers' own, and the operations one of them calls.

Only the config of a checkpoint is read: the class runs with a small config, as in a trial (trial.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel

from easytorch.auto import MODELS, classes, offered
from easytorch.auto.inputs import working_inputs
from easytorch.auto.plugging import attention_for, built_from, plug_attention
from easytorch.auto.report import ModuleClass, attention_layers, report_on
from easytorch.auto.specialising import specialise_modules
from easytorch.auto.trial import small_models, undisturbed
from easytorch.bridge.errors import nearest
from easytorch.protocol.checkpoint_files import check_config
from easytorch.protocol.native import NativeModel
from easytorch.protocol.native_classes import native_class

# Gives the names of the operations that are called within, which this room does not know.
Recorder = Callable[[], AbstractContextManager[set[str]]]

# The class that is run where the config names none: of the first of these auto classes that has one.
_PREFERRED = (
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForMaskedLM",
    "AutoModelForImageClassification",
    "AutoModel",
)


@dataclass(frozen=True)
class FoundClass:
    """A class that auto classes make of a config."""

    name: str
    native: bool
    autos: tuple[str, ...]


@dataclass(frozen=True)
class SmallRun:
    """A forward of a small model of one class. blocks: the layers of EasyTorch in it.

    attention_layers: by name; replaced: those that called our attention. reason: why the others did not, or why the
    model could not be run. modules: of transformers' own class, which of its other modules were replaced.
    """

    model_class: str
    blocks: tuple[str, ...]
    operations: tuple[str, ...]
    attention_layers: tuple[str, ...]
    replaced: tuple[str, ...]
    reason: str | None
    modules: tuple[ModuleClass, ...] = ()


@dataclass(frozen=True)
class Overview:
    model_type: str
    classes: tuple[FoundClass, ...]
    run: SmallRun

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def overview(name: str, recorder: Recorder) -> Overview:
    """The `Overview` of a model type, of a checkpoint's folder, or of a name on the Hub."""
    config = config_of(name)
    found = _classes(config)
    if not found:
        raise ValueError(f"{name}: no auto class makes a model of {type(config).__name__} ({config.model_type})")
    rows = tuple(FoundClass(one.__name__, issubclass(one, NativeModel), tuple(autos)) for one, autos in found.items())
    return Overview(config.model_type, rows, small_run(_chosen(found, config), config, recorder))


def config_of(name: str) -> PreTrainedConfig:
    """The config in a folder or on the Hub, or the default one of a model type."""
    if Path(name).is_dir():
        check_config(Path(name))
    elif name in CONFIG_MAPPING:
        made: PreTrainedConfig = CONFIG_MAPPING[name]()
        return made
    elif "/" not in name:
        raise ValueError(
            f"{name!r} is neither a folder nor a model type of transformers {transformers.__version__}"
            f"{nearest(name, CONFIG_MAPPING)}"
        )
    config: PreTrainedConfig = AutoConfig.from_pretrained(os.fspath(name))
    return config


def _classes(config: PreTrainedConfig) -> dict[type[PreTrainedModel], list[str]]:
    """Every class for `config`, native where there is one, and the auto classes that make it."""
    found: dict[type[PreTrainedModel], list[str]] = {}
    for auto in offered(MODELS):
        mapping = getattr(classes, auto)._model_mapping
        if type(config) not in mapping:
            continue
        made = mapping[type(config)]
        for one in made if isinstance(made, tuple) else (made,):
            found.setdefault(one, []).append(auto)
    return found


def _chosen(found: dict[type[PreTrainedModel], list[str]], config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class that the config names, else that of the first auto class in `_PREFERRED`."""
    for name in config.architectures or ():
        theirs = getattr(transformers, name, None)
        if isinstance(theirs, type) and issubclass(theirs, PreTrainedModel):
            return native_class(theirs)
    for auto in _PREFERRED:
        for one, autos in found.items():
            if auto in autos:
                return one
    return next(iter(found))


def small_run(model_class: type[PreTrainedModel], config: PreTrainedConfig, recorder: Recorder) -> SmallRun:
    """A forward of a small model of the class, with the attention that loading it would choose."""
    config = built_from(model_class, config)
    name = model_class.__name__
    failures: list[str] = []
    with undisturbed():
        choice = attention_for(model_class, config, None, wants_weights=False)
        for model in small_models(model_class, config, failures):
            plug_attention(model, choice)
            inputs, failure = working_inputs(model)
            if inputs is None:
                failures.append(failure)
                continue
            modules = () if isinstance(model, NativeModel) else specialise_modules(model)
            report: Any = report_on(model, choice.reason, modules).easytorch_report
            with recorder() as called, torch.no_grad():
                model(**inputs)
            layers = tuple(attention_layers(model))
            return SmallRun(
                name, blocks(model), tuple(sorted(called)), layers, report.called or (), choice.reason, modules
            )
    reason = choice.reason or f"no small {name} could be run ({failures[-1]})"
    return SmallRun(name, (), (), (), (), reason)


def blocks(model: nn.Module) -> tuple[str, ...]:
    """The classes of easytorch/layers that its modules are, or extend."""
    return tuple(sorted({found for part in model.modules() if (found := _block(part)) is not None}))


def _block(part: nn.Module) -> str | None:
    layers = (one for one in type(part).__mro__ if one.__module__.startswith("easytorch.layers."))
    return next((one.__name__ for one in layers if not one.__module__.endswith(".arguments")), None)  # an order alone
