"""Low-rank adapters (LoRA, arXiv:2106.09685) by EasyDeL's names, in PEFT's layers.

    apply_lora_to_layers(model, 8, r"q_proj|v_proj")     # now only the adapter trains
    values = split_lora_params(model)                    # name -> tensor, under the names of PEFT's files
    merge_lora_params(model, values)                     # and back
    unwrap_lora_to_layers(model)                         # the adapters into the weights, the layers as they were

The layers are PEFT's own, put in by transformers: `set_adapter`, `load_adapter` and `save_pretrained`, which writes
PEFT's files, work on the model as on one of transformers with an adapter.
"""

from __future__ import annotations

import importlib
import logging
import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from easytorch.argument_types import check_types
from easytorch.bridge.errors import nearest
from easytorch.protocol.adapter_loading import check_adapter_name
from easytorch.protocol.adapters import (
    LEAVES_WEIGHTS,
    active_adapters,
    adapter_names,
    check_droppable,
    check_mergeable,
    keep_what_adapters_change,
    merge_active,
    put_back,
    require_peft,
    restore_weights,
    take_out,
    unmerge,
    wrapped_layers,
)
from easytorch.protocol.lazy import require_memory
from easytorch.protocol.state import State, check_value, flatten
from easytorch.protocol.wrappers import refuse_peft_model, unwrapped

_LOG = logging.getLogger(__name__)
# What of a layer's parameters is LoRA's: the matrices, those of embeddings, DoRA's magnitudes.
_PARTS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")
_NAMED = 3
# Heads that some classes have among the modules of their base model.
_OF_A_TASK = {"score", "classifier", "qa_outputs"}
_WITH_SETTINGS = ("loftq", "corda")  # of `init`
_MAMBA = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")


@check_types("lora_rank", "lora_pattern", "rngs", "alpha", "dropout", "adapter_name")
def apply_lora_to_layers(
    model: PreTrainedModel,
    lora_rank: int,
    lora_pattern: str | None = None,
    verbose: bool = False,
    rngs: torch.Generator | int | None = None,
    *,
    alpha: float | None = None,
    dropout: float = 0.0,
    rslora: bool = False,
    dora: bool = False,
    init: bool | str = True,
    adapter_name: str = "default",
) -> Any:
    """Puts an adapter into linear layers of `model`, which is returned; every other parameter is frozen.

    lora_rank: the inner size, from 1 to the smaller side of every matrix. lora_pattern: a regular expression that is
    searched for in the names of linear layers; all of them but the head, of a task too, gates of one number, and those
    that PEFT refuses in Mamba or takes for experts, where it is None. rngs: a seed, or a generator one is drawn from.
    alpha: what the adapter adds counts alpha / rank times; the rank by default, so once.
    rslora: by alpha / sqrt(rank) instead (arXiv:2312.03732). dora: magnitudes are trained apart (arXiv:2402.09353).
    init: PEFT's `init_lora_weights`; of those that change the weights ("pissa", "olora") the weights are kept, to be
    restored when the adapter is dropped. A second adapter takes another `adapter_name`; the new one is active.

    `ValueError` where no layer has such a name, the rank does not fit, or the name is taken; nothing is changed then.
    """
    peft = require_peft()
    refuse_peft_model(model, "apply_lora_to_layers")
    _check_settings(lora_rank, lora_pattern, rngs, alpha, dropout, adapter_name)
    if adapter_name in getattr(model, "peft_config", {}):
        raise ValueError(f"there is an adapter {adapter_name!r} already; give this one another adapter_name")
    layers = _linear_layers(model, lora_pattern)
    for name, layer in layers.items():
        # not of the weight, which quantized layers decode to answer
        shape = (layer.out_features, layer.in_features) if isinstance(layer, nn.Linear) else tuple(layer.weight.shape)
        if lora_rank > min(shape):
            raise ValueError(f"lora_rank={lora_rank} is above the smaller side of {name}, {shape}")
        if init == "olora" and isinstance(layer, Conv1D):
            raise ValueError(f'init="olora" is for nn.Linear, and {name} is a Conv1D; pass another init, as "pissa"')
    if init in _WITH_SETTINGS:
        raise ValueError(f"init={init!r} needs settings of PEFT's own: make the adapter by peft.get_peft_model")
    config = peft.LoraConfig(
        r=lora_rank,
        lora_alpha=lora_rank if alpha is None else alpha,
        target_modules=_targets(model, layers),
        lora_dropout=dropout,
        use_rslora=rslora,
        use_dora=dora,
        init_lora_weights=init,
    )
    if init not in LEAVES_WEIGHTS:
        require_memory(model, f"init={init!r}")
    known, changed = adapter_names(model), set(vars(model).get("_weights_before_lora", {}))
    active = active_adapters(model) if known else []
    required = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    keep_what_adapters_change(model, layers, init)
    done = False
    try:
        with torch.random.fork_rng(devices=[], enabled=rngs is not None):
            if rngs is not None:
                drawn = torch.randint(2**63 - 1, (), generator=rngs) if isinstance(rngs, torch.Generator) else rngs
                torch.manual_seed(int(drawn))
            model.add_adapter(config, adapter_name)
        _check_put(model, layers, adapter_name)
        done = True
    finally:
        # PEFT checks some settings when it makes the layers, one after the other.
        if not done:
            if known:
                restore_weights(model, set(layers) - changed)
            put_back(model, adapter_name, known, active, required)
    if verbose:
        _LOG.warning("LoRA of rank %d in %d layers: %s", lora_rank, len(layers), ", ".join(layers))
    return model


@check_types()
def split_lora_params(model: PreTrainedModel, adapter_name: str | None = None) -> State:
    """The parameters of an adapter, the active one by default: name -> tensor, detached, in the model's own memory.

    The names are those of PEFT's files without `base_model.model.`: `layers.0.q_proj.lora_A.weight`.
    """
    return {name: parameter.detach() for name, parameter in _lora_parameters(model, adapter_name).items()}


@check_types("pytree")
@torch.no_grad()
def merge_lora_params(model: PreTrainedModel, pytree: Mapping[str, Any], adapter_name: str | None = None) -> Any:
    """Copies the values of `pytree`, nested or flat, into an adapter of `model`, which is returned.

    `ValueError` where a name is missing or unknown, or a shape differs; the model is then unchanged.
    """
    there = _lora_parameters(model, adapter_name)
    given = {name.removeprefix("base_model.model."): value for name, value in flatten(pytree).items()}
    for name, value in given.items():
        if name not in there:
            raise ValueError(f"{name!r} is no parameter of the adapter{nearest(name, there)}")
        check_value(name, value, there[name])
    if missing := [name for name in there if name not in given]:
        raise ValueError(f"{missing[0]!r} is not given; the adapter has {len(there)} parameters")
    for name, value in given.items():
        there[name].copy_(value)
    return model


@check_types()
def unwrap_lora_to_layers(model: PreTrainedModel, verbose: bool = False, *, merge: bool = True) -> Any:
    """Takes the adapters out of `model`, which is returned: its layers are plain again, and train as before.

    merge: the active adapters are added to the weights; with False they are dropped. `ValueError` where there is no
    adapter, and where the merged weights would not be finite; the model is then unchanged.
    """
    refuse_peft_model(model, "unwrap_lora_to_layers")
    names = adapter_names(model)
    if not names:
        raise ValueError(f"{type(model).__name__} has no adapter; it was merged already, or none was applied")
    count = len(wrapped_layers(model))
    if merge:
        check_mergeable(model)
        merge_active(model)
    else:
        check_droppable(model)
        unmerge(model)
    take_out(model, merged=merge)
    if verbose:
        done = "merged into" if merge else "dropped from"
        _LOG.warning("adapters %s %s %d layers", ", ".join(map(repr, names)), done, count)
    return model


def _check_settings(rank: Any, pattern: Any, rngs: Any, alpha: Any, dropout: Any, adapter_name: Any) -> None:
    if type(rank) is not int or rank < 1:
        raise ValueError(f"lora_rank={rank!r} must be an int of at least 1")
    if pattern is not None and not isinstance(pattern, str):
        raise TypeError(f"lora_pattern={pattern!r} must be a regular expression, as 'q_proj|v_proj', or None")
    if rngs is not None and not isinstance(rngs, torch.Generator) and type(rngs) is not int:
        raise TypeError(f"rngs={rngs!r} must be a seed, a torch.Generator or None")
    for name, number in (("alpha", alpha), ("dropout", dropout)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int | float)):
            raise TypeError(f"{name}={number!r} must be a number")
    if alpha is not None and not 0 < alpha < math.inf:
        raise ValueError(f"alpha={alpha!r} must be above 0 and finite")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout={dropout!r} must be at least 0 and below 1")
    if not isinstance(adapter_name, str) or not adapter_name or "." in adapter_name:
        raise ValueError(f"adapter_name={adapter_name!r} must be a name without dots, as 'default'")
    check_adapter_name(adapter_name)


def _linear_layers(model: PreTrainedModel, pattern: str | None) -> dict[str, nn.Linear | Conv1D]:
    """The linear layers whose names have `pattern`; those that carry an adapter already by their own name."""
    head = model.get_output_embeddings() if pattern is None else None
    found: dict[str, nn.Linear | Conv1D] = {}
    for name, module in model.named_modules():
        plain = module.get_base_layer() if hasattr(module, "get_base_layer") else module
        inside = name.endswith(".base_layer") or any(f".{part}." in f"{name}." for part in _PARTS)
        if isinstance(plain, nn.Linear | Conv1D) and plain is not head and not inside:
            found[name] = plain
    if pattern is None:
        left = _taken_for_experts(model) | _OF_A_TASK
        outside = _outside_the_base(model)
        return {
            name: layer
            for name, layer in found.items()
            if name.rpartition(".")[2] not in left
            and layer not in outside
            and not _beside_kernels(model, name)
            and getattr(layer, "out_features", 0) != 1
        }
    try:
        wanted = {name: layer for name, layer in found.items() if re.search(pattern, name)}
    except re.error as error:
        raise ValueError(f"lora_pattern={pattern!r} is no regular expression: {error}") from error
    if not wanted:
        some = ", ".join(list(found)[:_NAMED])
        raise ValueError(f"no linear layer of {type(model).__name__} has {pattern!r} in its name; they are {some}, ...")
    return wanted


def _outside_the_base(model: PreTrainedModel) -> set[nn.Module]:
    """The modules of a task's head: those that a model which predicts no tokens has beside its base model."""
    if model.get_output_embeddings() is not None:
        return set()
    return set(model.modules()) - set(model.base_model.modules())


def _beside_kernels(model: PreTrainedModel, name: str) -> bool:
    """Whether PEFT refuses an adapter there: Mamba's fused kernels read the weight of `out_proj` themselves."""
    return model.config.model_type in _MAMBA and name.rpartition(".")[2] == "out_proj"


def _taken_for_experts(model: PreTrainedModel) -> set[str]:
    """The endings of names under which PEFT adapts the fused matrices of experts, whatever else is called so: the
    experts' projections of transformers 4."""
    require_peft()
    try:
        # not by the attribute: PEFT imports it when it needs it
        tables: Any = importlib.import_module("peft.utils.transformers_weight_conversion")
    except ModuleNotFoundError:  # PEFT of before transformers 5
        return set()
    family = getattr(tables, "_MODEL_TO_CONVERSION_PATTERN", {}).get(model.config.model_type)
    return set(getattr(tables, "_MOE_TARGET_MODULE_MAPPING", {}).get(family, ()))


def _check_put(model: PreTrainedModel, layers: Mapping[str, Any], adapter_name: str) -> None:
    """`ValueError` where PEFT put an adapter into other layers than it was told."""
    put = {name for name, layer in wrapped_layers(model).items() if adapter_name in getattr(layer, "lora_A", ())}
    if wrong := sorted(set(layers) ^ put):
        raise ValueError(
            f"PEFT takes {', '.join(sorted(_taken_for_experts(model)))} of {model.config.model_type} for its experts, "
            f"whose matrices are fused, and cannot adapt {wrong[0]}: choose a lora_pattern without these names"
        )


def _targets(model: PreTrainedModel, layers: Mapping[str, nn.Linear | Conv1D]) -> list[str] | str:
    """PEFT's `target_modules` for exactly these layers: endings of names where no other module has one of them."""
    endings = sorted({name.rpartition(".")[2] for name in layers})
    matched = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in endings}
    if matched == set(layers):
        return endings
    return "|".join(map(re.escape, layers))


def _lora_parameters(model: PreTrainedModel, adapter_name: str | None) -> dict[str, nn.Parameter]:
    model = unwrapped(model)
    names = adapter_names(model)
    if not names:
        raise ValueError(f"{type(model).__name__} has no adapter; apply_lora_to_layers or load_adapter gives it one")
    wanted = adapter_name if adapter_name is not None else active_adapters(model)[0]
    if wanted not in names:
        raise ValueError(f"there is no adapter {wanted!r}; there are {names}")
    found: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        place = next((number for number, part in enumerate(parts) if part in _PARTS), None)
        if place is not None and parts[place + 1] == wanted:
            found[".".join([*parts[: place + 1], *parts[place + 2 :]])] = parameter
    return found
