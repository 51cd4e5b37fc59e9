"""What a captured step of a model depends on beside its inputs, so that a change of it is noticed."""

from __future__ import annotations

import itertools
import operator
import os
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

from easytorch.layers.config import wants_attentions
from easytorch.layers.linear import watched
from easytorch.layers.masks import masks_refusal
from easytorch.operations.dispatch import environment

MEMBERS = ("_parameters", "_buffers", "_modules")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_dtype = operator.attrgetter("dtype")
_VARIABLES = ("EASYTORCH_OPS", "EASYTORCH_CHECK")


class ModelSnapshot:
    """The modules and tensors of a model, where they lie, and its settings. `holds()`: whether they are the same still.

    Values of weights may change in place. Noticed are other modules, weights, dtypes and devices, hooks, adapters,
    training mode, implementations of attention and experts, autocast and the precision of products. Not noticed are
    numbers that a config or a module holds, such as a window, and another shape of the same memory. It keeps neither
    the model alive nor what its own attributes hold, which may be methods of it.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._model, self._parts = weakref.ref(model), modules[1:]
        variables = list(map(vars, modules))
        self._variables = variables[1:]
        self._dicts = [one[name] for one in variables for name in MEMBERS]
        self._members = list(itertools.chain.from_iterable(map(dict.values, self._dicts)))
        self._tensors = [one for one in self._members if isinstance(one, Tensor)]
        self._addresses = list(map(Tensor.data_ptr, self._tensors))
        self._dtypes = list(map(_dtype, self._tensors))  # other numbers may lie where the old ones did
        self._kind, self._kinds = type(model), list(map(type, self._parts))
        self._hooks = [one[name] for one in variables for name in HOOKS]
        self._watched = self._count_hooks(variables[0])
        configs: list[Any] = [getattr(module, "config", None) for module in modules]
        self._configs = list({id(one): one for one in configs if hasattr(one, "_attn_implementation")}.values())
        # PEFT's layers; transformers' models have methods of the same names
        self._adapters: list[Any] = [
            one for one in self._parts if isinstance(getattr(one, "merged_adapters", None), list)
        ]
        self._device = self._tensors[0].device.type if self._tensors else "cpu"
        self._settings = self._read_settings(variables[0])

    def holds(self) -> bool:
        if (model := self._model()) is None:
            return False
        variables = vars(model)
        # C alone walks the modules: this is at each token, and a model has hundreds of them
        members = itertools.chain.from_iterable(map(dict.values, self._dicts))
        return (
            sum(map(len, self._dicts)) == len(self._members)
            and all(map(operator.is_, members, self._members))
            and list(map(Tensor.data_ptr, self._tensors)) == self._addresses
            and list(map(_dtype, self._tensors)) == self._dtypes
            and type(model) is self._kind
            and list(map(type, self._parts)) == self._kinds
            and self._count_hooks(variables) == self._watched
            and self._read_settings(variables) == self._settings
        )

    def _count_hooks(self, variables: dict[str, Any]) -> int:
        """variables: the model's own."""
        others = sum("forward" in one for one in self._variables)
        return sum(map(len, self._hooks)) + ("forward" in variables) + others

    def _read_settings(self, variables: dict[str, Any]) -> tuple[Any, ...]:
        return (
            variables["training"] or any(map(operator.itemgetter("training"), self._variables)),
            [(one._attn_implementation, getattr(one, "_experts_implementation", None)) for one in self._configs],
            [
                (tuple(one.active_adapters), one.disable_adapters, tuple(one.merged_adapters), dict(one.scaling))
                for one in self._adapters
            ],
            bool(global_hooks._global_forward_hooks or global_hooks._global_forward_pre_hooks),
            (torch.is_autocast_enabled(self._device), torch.get_autocast_dtype(self._device)),
            torch.get_float32_matmul_precision(),
            list(map(os.environ.get, _VARIABLES)),
        )


def plain_values(model: nn.Module) -> list[Any]:
    """The numbers, strings and sequences of them that modules and configs hold, and the layouts of tensors: what a
    snapshot does not look at at each token, and a call does that goes on from another one's captured step."""
    found: list[Any] = []
    configs: dict[int, Any] = {}
    for module in model.modules():
        found.append({name: value for name, value in vars(module).items() if _is_plain(value)})
        own = itertools.chain(module._parameters.values(), module._buffers.values())
        found.append([(one.shape, one.stride()) for one in own if one is not None])
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            configs[id(config)] = config
    found += [{name: repr(value) for name, value in vars(one).items()} for one in configs.values()]
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def capture_refusal(model: nn.Module, *, before_prompt: bool = False) -> str | None:
    """Why a step of `model` cannot be captured, as far as the model says; None where it may be.

    before_prompt: hooks are not looked at; those of a report on the first forward will be gone.
    """
    if model.training:
        return "the model is in training mode: call model.eval()"
    for name, module in model.named_modules():
        if watched(module) and not before_prompt:
            return f"{name or type(module).__name__} has hooks or another forward, which a replay would not run"
    tensors = [*model.parameters(), *model.buffers()]
    if len(devices := sorted({str(one.device) for one in tensors})) > 1:
        return f"the model's tensors are on several devices: {', '.join(devices)}"
    if other := next((type(one) for one in tensors if type(one) not in (Tensor, nn.Parameter)), None):
        return f"the model has tensors of {other.__name__}"
    if environment.checking():
        return "EASYTORCH_CHECK=1 compares results on the host"
    config: Any = getattr(model, "config", None)
    if wants_attentions(config) or getattr(config, "output_hidden_states", False):
        return "the model's config asks for attentions or hidden states"
    return masks_refusal(config.get_text_config(decoder=True)) if hasattr(config, "get_text_config") else None
