"""Adapters in a model: adding PEFT's layers, and restoring the layers that they replaced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from easytorch.layers.quantized import QuantizedLinear
from easytorch.protocol.adapter_methods import give_adapter_methods, take_adapter_methods
from easytorch.protocol.foreign_calls import unwatch_calls, watch_calls

# PEFT's ways to begin that leave the weights alone; the others (pissa, olora, ...) take from the weights what the
# adapter begins with.
LEAVES_WEIGHTS = (True, False, "gaussian", "orthogonal", "eva", "mica")
_REQUIRED, _WEIGHTS = "_trained_before_lora", "_weights_before_lora"


def require_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ImportError("LoRA needs PEFT: pip install peft") from error
    return peft


def adapter_names(model: PreTrainedModel) -> list[str]:
    """Those that transformers put in, or PEFT, whose wrapper may stand around `model`."""
    configs = getattr(model, "peft_config", {})
    return list(configs) if configs and (model._hf_peft_config_loaded or wrapped_layers(model)) else []


def active_adapters(model: Any) -> list[str]:
    if not adapter_names(model) or model._hf_peft_config_loaded:
        return list(model.active_adapters())
    return list(next(iter(wrapped_layers(model).values())).active_adapters)


def check_savable(model: Any) -> None:
    """`ValueError` where the files of an adapter would load as another one.

    PEFT's own `save_pretrained` writes them so, too; with `path_initial_model_for_weight_conversion` it subtracts the
    adapter's first values from it instead, which have to be saved before training.
    """
    for name in adapter_names(model):
        init = getattr(model.peft_config[name], "init_lora_weights", True)
        if isinstance(init, str) and init.startswith("pissa_niter"):
            raise ValueError(
                f"adapter {name!r} began with init_lora_weights={init!r}, which draws random numbers: whoever loads "
                "its files draws others, and gets other weights below it. Save a train state (to_state().save), merge "
                "it (unwrap_lora_to_layers) and save the model, or begin with init='pissa'"
            )


def wrapped_layers(model: nn.Module) -> dict[str, Any]:
    """PEFT's layers by name."""
    tuner: Any = require_peft().tuners.tuners_utils.BaseTunerLayer
    return {name: module for name, module in model.named_modules() if isinstance(module, tuner)}


def described_adapters(model: Any) -> list[list[Any]]:
    """(name, PEFT's config as JSON holds it) of each adapter; `add_described_adapters` makes them again."""
    if not adapter_names(model):
        return []
    described = []
    for name, config in model.peft_config.items():
        content = {key: sorted(one) if isinstance(one, set) else one for key, one in config.to_dict().items()}
        described.append([name, content])
    return described


def frozen_before_adapters(model: Any) -> list[str]:
    """The parameters that required no gradients before the first adapter, by the names that they had then."""
    return [name for name, required in vars(model).get(_REQUIRED, {}).items() if not required]


def add_described_adapters(model: Any, described: Sequence[Sequence[Any]], active: list[str]) -> None:
    """Puts in adapters whose values, and those of the weights below them, are filled later."""
    peft = require_peft()
    keep_what_adapters_change(model, {}, True)
    for name, content in described:
        config = peft.PeftConfig.from_peft_type(**content)
        begins = getattr(config, "init_lora_weights", True)
        if begins not in LEAVES_WEIGHTS:
            config.init_lora_weights = True  # the state's weights lack already what this init takes from them
        model.add_adapter(config, name)
        if begins not in LEAVES_WEIGHTS:
            model.peft_config[name].init_lora_weights = begins
    model.set_adapter(active)


def keep_what_adapters_change(model: PreTrainedModel, layers: dict[str, Any], init: bool | str) -> None:
    """Notes what training and `init` change in `model`, for `take_out` to restore; called before one is added."""
    give_adapter_methods(model)
    if not adapter_names(model):
        watch_calls(model)
        vars(model)[_REQUIRED] = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    if init not in LEAVES_WEIGHTS:
        kept = vars(model).setdefault(_WEIGHTS, {})
        for name, layer in layers.items():
            if name not in kept and "weight" in layer._parameters:
                kept[name] = layer.weight.detach().clone()


def unmerge(model: PreTrainedModel) -> None:
    """Takes adapters out of the weights that PEFT's own `merge` put them into."""
    for layer in wrapped_layers(model).values():
        if layer.merged:
            layer.unmerge()


def restore_weights(model: PreTrainedModel, names: set[str] | None = None) -> None:
    """The weights as they were before an adapter's `init` took from them; of the layers `names`, or of all."""
    kept = vars(model).get(_WEIGHTS, {})
    with torch.no_grad():
        for name in list(kept) if names is None else names & kept.keys():
            layer: Any = model.get_submodule(name)
            layer = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer
            layer.weight.copy_(kept.pop(name))


def check_droppable(model: PreTrainedModel) -> None:
    """`ValueError` where an adapter took from weights that are not known any more."""
    kept = vars(model).get(_WEIGHTS, {})
    for adapter, config in model.peft_config.items():
        init = getattr(config, "init_lora_weights", True)
        if init in LEAVES_WEIGHTS:
            continue
        layers = [name for name, layer in wrapped_layers(model).items() if adapter in getattr(layer, "lora_A", {})]
        if unknown := [name for name in layers if name not in kept]:
            raise ValueError(
                f"adapter {adapter!r} was loaded, and its init_lora_weights={init!r} has changed the weight of "
                f"{unknown[0]}: it cannot be dropped; merge it, or load the model again"
            )


def check_mergeable(model: PreTrainedModel) -> None:
    """`ValueError` where an active adapter cannot become part of the weights."""
    holders: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), []).append(name)
    peft = require_peft()
    for name, layer in wrapped_layers(model).items():
        base: Any = layer.get_base_layer()
        if isinstance(base, QuantizedLinear):
            raise ValueError(
                "the weights are quantized, and would be rounded again with the adapters in them: "
                "drop the adapters by merge=False, or load them on the dequantized model"
            )
        active = set(layer.active_adapters) & set(layer._get_available_adapters())
        biased = [one for one in active if getattr(layer, "lora_bias", {}).get(one)]
        if biased and getattr(base, "bias", None) is None:
            raise ValueError(
                f"adapter {biased[0]!r} has a bias, and {name} has none to merge it into; drop it by merge=False"
            )
        # of a vocabulary's tokens both ends of a tie may change alike
        if active and not isinstance(layer, peft.tuners.trainable_tokens.layer.TrainableTokensLayer):
            _check_not_tied(name, base, holders)
    for name, wrapper in model.named_modules():
        if isinstance(wrapper, peft.utils.other.ModulesToSaveWrapper) and wrapper.active_adapters:
            _check_not_tied(name, wrapper.original_module, holders)


def _check_not_tied(name: str, module: nn.Module, holders: dict[int, list[str]]) -> None:
    for parameter in module.parameters():
        if tied := [one for one in holders.get(id(parameter), []) if not one.startswith(f"{name}.")]:
            raise ValueError(
                f"{name} has a weight that is {tied[0]} too, which merging would change or untie: give it a weight of "
                "its own, or drop the adapters by merge=False"
            )


def merge_active(model: PreTrainedModel) -> None:
    """Adds the active adapters to the weights of all layers, or of none if one of the sums is not finite."""
    layers = wrapped_layers(model).values()
    for layer in layers:
        _try_to_merge(layer)
    for layer in layers:
        layer.merge()


def _try_to_merge(layer: Any) -> None:
    """Merges one layer, for PEFT's errors, and puts the very numbers back: to subtract an adapter would round them.

    One by one, so that no more than a layer's weights are in memory twice.
    """
    kept = [
        (module, name, parameter, parameter.data, parameter.detach().clone())
        for module in layer.get_base_layer().modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    merged = list(layer.merged_adapters)  # by the user, before
    try:
        layer.merge(safe_merge=True)
    finally:
        if merged:
            layer.merged_adapters[:] = merged
        elif layer.merged:
            layer.unmerge()
        with torch.no_grad():
            for module, name, parameter, data, values in kept:
                module._parameters[name] = parameter
                data.copy_(values)
                parameter.data = data


def put_back(model: PreTrainedModel, name: str, known: list[str], active: list[str], required: dict[str, bool]) -> None:
    """Takes out the adapter `name` alone, which was not added whole; the others are as they were.

    known, active, required: the adapters, the active ones and what required gradients before.
    """
    if not known:
        take_out(model)
        return
    if name in model.peft_config:
        model.delete_adapter(name)
    model.set_adapter(active)
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(required.get(key, parameter.requires_grad))


def take_out(model: PreTrainedModel, *, merged: bool = False) -> None:
    """Replaces PEFT's layers by the plain ones and restores what required gradients before.

    merged: the active adapters are in the weights; the copies of modules that adapters train apart
    (`modules_to_save`) stay then, else the modules that they are copies of.
    """
    if not merged:
        restore_weights(model)
    copies: Any = require_peft().utils.other.AuxiliaryTrainingWrapper
    for name, wrapper in [(name, one) for name, one in model.named_modules() if isinstance(one, copies)]:
        active = wrapper.unload_and_optionally_merge_module(False, False, None) if merged else wrapper.original_module
        _put(model, name, active)
    for name, layer in wrapped_layers(model).items():
        _put(model, name, layer.get_base_layer())
    flags = vars(model).pop(_REQUIRED, {})
    vars(model).pop(_WEIGHTS, None)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(flags.get(name, parameter.is_floating_point()))
    vars(model).pop("_hf_peft_config_loaded", None)  # False by the class
    vars(model).pop("peft_config", None)
    unwatch_calls(model)
    take_adapter_methods(model)
    # `load_adapter` leaves the renamings of the adapter's file where `save_pretrained` looks for those of the model's.
    kept = vars(model).get("_weight_conversions") or ()
    if any("base_model" in pattern or "lora_" in pattern for one in kept for pattern in one.source_patterns):
        del model._weight_conversions


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)
