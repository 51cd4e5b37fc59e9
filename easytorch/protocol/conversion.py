"""Any transformers model, native or not, as a tree of arrays with Flax's names, and back.

`BridgeMixin` and the auto classes call these; for models loaded elsewhere call them directly:

    from easytorch.protocol import conversion
    tree = conversion.to_flax(model)
    model = conversion.from_flax(T5ForConditionalGeneration, config, tree)
"""

from __future__ import annotations

import copy as copies
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import rename_source_key

from easytorch.argument_types import check_types
from easytorch.bridge.core.config import Config
from easytorch.bridge.dtypes import to_numpy
from easytorch.bridge.memory.tree import Framework, MemoryTree, Shardings, Tree
from easytorch.bridge.names.architecture import Architecture, architecture_like
from easytorch.bridge.names.tied_weights import held_apart
from easytorch.bridge.rules.table import Rules, compile_rules
from easytorch.bridge.schemes.registry import get_scheme, recognise
from easytorch.bridge.state import (
    infos_of,
    same_arrays,
    state_dict_to_tree,
    tree_to_dtensors,
    tree_to_state_dict,
)
from easytorch.layers.attention import OURS
from easytorch.layers.experts import OURS as EXPERTS
from easytorch.layers.quantized import is_quantized
from easytorch.protocol.lazy import require_memory
from easytorch.protocol.load_checks import check_shapes, refuse_left_over, refuse_missing

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

StateDict = Mapping[str, torch.Tensor]
Transform = Callable[[StateDict], Tree]
ModelClass = type[PreTrainedModel]


@check_types()
def to_flax(
    model: PreTrainedModel,
    *,
    framework: Framework = "numpy",
    shardings: Shardings = None,
    copy: bool | None = None,
    scheme: str = "flax",
) -> Tree:
    """The weights of `model` as a nested dict of arrays, named as HF Flax does: `{"params": tree}` for a linen module.

    A model with batch statistics gives `{"params": ..., "batch_stats": ...}`. bf16 is `ml_dtypes.bfloat16`, which jax
    accepts. Experts are separate leaves, as in checkpoints; integers that a class computes (index tables, counters) are
    left out.
    framework, shardings, copy: see `bridge.memory.tree`. scheme: the names of another program, as in `bridge.convert`.
    """
    require_memory(model, "to_flax")
    transform = transform_fn(model, framework=framework, shardings=shardings, copy=copy, scheme=scheme)
    return transform(model.state_dict())


@check_types()
def transform_fn(
    model: PreTrainedModel,
    *,
    framework: Framework = "numpy",
    shardings: Shardings = None,
    copy: bool | None = None,
    scheme: str = "flax",
) -> Transform:
    """torch state dict -> tree, for models like `model`: what `to_flax` does. It keeps none of the model's weights.

    Weights that are `DTensor`s (FSDP, tensor parallel) are gathered one by one, so every process must call it.
    """
    _refuse_changed_layers(model)
    return transform_for(
        type(model),
        model.config,
        tuple(model.state_dict()),
        framework=framework,
        shardings=shardings,
        copy=copy,
        scheme=scheme,
    )


def transform_for(
    model_class: ModelClass,
    config: PreTrainedConfig,
    names: Collection[str],
    *,
    framework: Framework = "numpy",
    shardings: Shardings = None,
    copy: bool | None = None,
    scheme: str = "flax",
) -> Transform:
    """`transform_fn` of a model that is known by its class, its config and the names of its weights."""
    config = plain_config(config)
    architecture = architecture_of_class(model_class, config, names)
    rules = rules_of(architecture, config, scheme)
    fill = architecture.shapes if architecture.tie else ()

    def transform(state_dict: StateDict) -> Tree:
        plain = architecture.names.to_hub({name: _full_tensor(tensor) for name, tensor in state_dict.items()})
        arrays = {name: to_numpy(tensor) for name, tensor in plain.items()}
        apart = held_apart(infos_of(arrays), architecture, same_arrays(arrays.__getitem__))
        return state_dict_to_tree(
            plain,
            rules_of(replace(architecture, apart=apart), config, scheme) if apart else rules,
            tie_word_embeddings=architecture.tie,
            fill=fill,
            framework=framework,
            shardings=shardings,
            copy=copy,
            complete=False,
        )

    return transform


@check_types()
def from_flax(
    model_class: ModelClass, config: PreTrainedConfig, params: Any, *, copy: bool | None = None, **kwargs: Any
) -> Any:
    """A model of `config` with the weights of a tree, of linen, of nnx or of plain arrays (`bridge.memory.tree`).

    Its names may follow any scheme of the bridge, which is detected. kwargs: `from_pretrained`'s.
    `CheckpointError` unless `strict=False` when a weight is missing, left over or of another shape.
    """
    architecture, rules, leaves = _open(model_class, config, params)
    weights = tree_to_state_dict(leaves, rules, tie_word_embeddings=architecture.tie, copy=copy, complete=False)
    weights = _as_loaded(model_class, weights)
    wants_info = kwargs.pop("output_loading_info", False)
    ignore, strict = kwargs.pop("ignore_mismatched_sizes", False), kwargs.pop("strict", True)
    kwargs |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
    model, info = cast(Any, model_class).from_pretrained(None, config=config, state_dict=weights, **kwargs)
    check_shapes(model, info, None, ignore)
    table, names = compile_rules(rules), architecture.names
    missing = [name for name in info["missing_keys"] if not table.is_buffer(names.hub_name(name) or name)]
    left_over = [name for name in info["unexpected_keys"] if not table.is_spare(name)]
    if strict:
        refuse_missing(model, missing, left_over, None, "the tree")
        refuse_left_over(model, left_over, None, "the tree")
    return (model, info) if wants_info else model


def state_dict_from_flax(
    model_class: ModelClass,
    config: PreTrainedConfig,
    params: Any,
    *,
    copy: bool | None = None,
    mesh: DeviceMesh | None = None,
) -> dict[str, torch.Tensor]:
    """The weights of a tree under the names in checkpoints of `model_class`, on the CPU.

    mesh: a `torch.distributed` mesh whose dimensions have the names of jax's mesh axes: each weight is then a `DTensor`
    with the leaf's placements, and every process fills its own shards (`bridge.memory.dtensors`).
    """
    architecture, rules, leaves = _open(model_class, config, params)
    if mesh is None:
        return tree_to_state_dict(leaves, rules, tie_word_embeddings=architecture.tie, copy=copy, complete=False)
    return tree_to_dtensors(leaves, rules, mesh, tie_word_embeddings=architecture.tie)


def described(model_class: ModelClass, config: PreTrainedConfig, given: Collection[str]) -> tuple[Architecture, Rules]:
    """The weights of `model_class`, and the rules for their Flax names and those of `given`, the present names."""
    architecture = architecture_of_class(model_class, config, given)
    return architecture, rules_of(architecture, config, "flax")


@check_types()
def to_torch(model: PreTrainedModel, *, copy_weights: bool = False) -> PreTrainedModel:
    """transformers' own class of the same name, on the same device, in the same dtypes, training or not.

    It shares the parameters, so training one trains the other; with `copy_weights` it has its own.
    """
    _refuse_changed_layers(model)
    require_memory(model, "to_torch")
    config = plain_config(model.config)
    weights = model.state_dict(keep_vars=True)
    if copy_weights:
        weights = copies.deepcopy(dict(weights))  # one call, so that tied weights stay tied
    plain = {name: weight.detach() for name, weight in weights.items()}
    theirs: Any = _their_class(type(model))
    hub = architecture_of_class(type(model), config).names.to_hub(plain)
    built = theirs.from_pretrained(None, config=config, state_dict=hub, dtype=model.dtype)
    loaded: PreTrainedModel = built.to(model.device)
    for name, parameter in loaded.named_parameters():
        parameter.requires_grad_(
            weights[name].requires_grad
        )  # assigning gives a weight the flag of the one it replaces
    loaded.load_state_dict(weights, assign=True)
    if model.can_generate():
        loaded.generation_config = copies.deepcopy(model.generation_config)
    loaded.train(model.training)
    return loaded


def _refuse_changed_layers(model: Any) -> None:
    """`TypeError` for anything but a transformers model, and for one with an adapter or with quantized weights."""
    if hasattr(model, "merge_and_unload") or getattr(model, "_hf_peft_config_loaded", False):
        raise TypeError(
            f"{type(model).__name__} has an adapter (PEFT), which has no place in the tree; pass what "
            "`PeftModel.merge_and_unload()` returns"
        )
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"{type(model).__name__} is no model of transformers; pass a PreTrainedModel")
    if is_quantized(model) or getattr(model, "is_quantized", False):
        raise TypeError(
            f"the weights of {type(model).__name__} are quantized, and are not converted; pass what "
            "`easytorch.protocol.dequantize(model)` returns"
        )


def _as_loaded(model_class: ModelClass, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`weights` renamed so that transformers' loader puts each where it belongs.

    The loader strips or adds the base model's prefix wherever the result is also a name of the model: in a class with
    both, as BeitForMaskedImageModeling's `layernorm` and `beit.layernorm`, it swaps them. So they are swapped here too.
    """
    base = model_class.base_model_prefix or None
    return {rename_source_key(name, [], [], base, weights)[0]: weight for name, weight in weights.items()}


def _full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the CPU; a `DTensor` is gathered."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).cpu()


def _open(model_class: ModelClass, config: PreTrainedConfig, params: Any) -> tuple[Architecture, Rules, MemoryTree]:
    leaves = MemoryTree(params)
    architecture = architecture_of_class(model_class, config, leaves.tensors)
    scheme = recognise(leaves.tensors, _content(config))
    return architecture, scheme.rules(_content(config), architecture, leaves.tensors), leaves


def architecture_of_class(
    model_class: ModelClass, config: PreTrainedConfig, given: Collection[str] = ()
) -> Architecture:
    """The weights of transformers' own class. given: the present names, torch's or the tree's."""
    with torch.device("meta"):
        model = _their_class(model_class)(plain_config(config))
    return architecture_like(model, given)


def rules_of(architecture: Architecture, config: PreTrainedConfig, scheme: str) -> Rules:
    """The rules between torch's names and those of `scheme`."""
    return get_scheme(scheme).rules(_content(config), architecture, None)


def _content(config: PreTrainedConfig) -> Config:
    return Config(Path("config.json"), config.to_dict())


def _their_class(model_class: ModelClass) -> ModelClass:
    """transformers' class that a native one stands for; any other class as it is."""
    native = model_class.__module__.startswith("easytorch.models.")
    return getattr(transformers, model_class.__name__) if native else model_class


def plain_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy without our attention and experts, so that transformers chooses its own."""
    config = copies.deepcopy(config)
    waiting = [config]
    while waiting:
        part = waiting.pop()
        if part._attn_implementation in OURS:
            part._attn_implementation_internal = None
        if part._experts_implementation == EXPERTS:
            part._experts_implementation_internal = None
        inner = (getattr(part, name, None) for name in part.sub_configs)
        waiting += [one for one in inner if isinstance(one, PreTrainedConfig)]
    return config
