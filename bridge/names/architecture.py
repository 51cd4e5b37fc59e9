"""The weights of an architecture, from transformers' own class on the meta device, and the check against them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from easytorch.bridge.core.config import Config
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.errors import CheckpointError, nearest
from easytorch.bridge.names.computed_buffers import is_computed
from easytorch.bridge.names.hub_names import HubNames
from easytorch.bridge.rules.table import TIED_ALWAYS, RuleTable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# What transformers and torch raise for values of the wrong kind or size.
UNBUILDABLE = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError, AssertionError)

# What a config calls the number of its layers, blocks or experts, and how many of them are built in no time.
_COUNT = re.compile(r"num_hidden_layers|((n|num)_)?((encoder|decoder)_)?layers?|(num_)?blocks|depth|(\w+_)?experts")
_HARMLESS = 512
# Those of layers, of which no model has fewer than none.
_LAYERS = re.compile(r"num_hidden_layers|((n|num)_)?((encoder|decoder)_)?layers?")
# The same counts as lists by stage: `[3, 4, 6, 3]`, `[[["global", "local"], 12]]`.
_STAGES = ("depths", "attention_types")
# transformers builds two dicts with an entry for each label; ImageNet-21k has 21 843.
_MOST_LABELS = 1_000_000


@dataclass(frozen=True)
class Architecture:
    """The weights a checkpoint must have (`shapes`), by hub name: what `save_pretrained` writes.

    `base` is the name of the base model in them, `tie` whether the config ties weights. `given` are the
    checkpoint's names, of any version and for any head, which a table must know too. `apart` are tied weights that the
    torch checkpoint stores separately (`bridge.names.tied_weights`).
    """

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    base: str
    tie: bool
    # `HubNames`, or `OutlinedNames`, which have no `model`: those who need one ask for the built architecture.
    names: Any
    given: Collection[str] = ()
    apart: frozenset[str] = frozenset()


def architecture_of(config: Config, tensors: int, given: Collection[str] = ()) -> Architecture:
    """The architecture `config` describes, of a checkpoint that holds that many `tensors`, by the names `given`.

    Nothing is allocated. `CheckpointError` for a class transformers does not have or a config it cannot build.
    """
    import torch
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    refuse_counts(config.content, config, tensors)
    if config.model_type not in transformers.CONFIG_MAPPING:
        hint = nearest(config.model_type, transformers.CONFIG_MAPPING)
        raise CheckpointError(
            f"unknown architecture: transformers has no family {config.model_type!r}{hint}; correct `model_type`",
            file=config.file,
        )
    try:
        settings = transformers.CONFIG_MAPPING[config.model_type].from_dict(_with_floats(config.content))
        model_class = _model_class(config, type(settings))
        with torch.device("meta"):
            model = model_class(settings)
        return architecture_like(model, given)
    except CheckpointError:
        raise
    except (StrictDataclassError, *UNBUILDABLE) as error:
        # Some errors say in their second line what the first announces.
        first, *others = (line.strip() for line in str(error).strip().split("\n"))
        reason = f"{first} {others[0]}" if first.endswith(":") and others else first
        raise CheckpointError(
            f"describes no model that can be built ({reason}); correct it", file=config.file
        ) from error


def architecture_like(model: PreTrainedModel, given: Collection[str] = ()) -> Architecture:
    """The architecture of a model that is on the meta device."""
    names = HubNames(model)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    # transformers recomputes these where a checkpoint lacks them: sinusoidal positions, for example.
    made = re.compile("|".join(model._keys_to_ignore_on_load_missing or ()) or r"(?!)")
    optional = {
        name
        for name, tensor in names.state.items()
        if made.search(name) or (name not in parameters and is_computed(name, tensor))
    }
    return Architecture(
        name=type(model).__name__,
        shapes={
            name: tuple(tensor.shape)
            for name, tensor in names.tensors.items()
            if names.places[name].name not in optional
        },
        base=model.base_model_prefix,
        # Vision and audio configs do not say; a submodel's config may.
        tie=getattr(model.config, "tie_word_embeddings", False) or bool(model.all_tied_weights_keys),
        names=names,
        given=given,
    )


def refuse_counts(content: dict[str, Any], config: Config, tensors: int) -> None:
    """Refuses layers and experts by the billion, each of which would be a module or a name, and layers below zero."""
    for key, value in _named(content):
        if isinstance(value, dict):
            refuse_counts(value, config, tensors)
        if key == "num_labels" and isinstance(value, int) and value > _MOST_LABELS:
            raise CheckpointError(f"`{key}` is {value}; {_MOST_LABELS} is the most", file=config.file)
        if key in _STAGES:
            value = _sum(value)
        # A count may be of modules that this class lacks, as a decoder's in the config of an encoder.
        limit = tensors if key == "num_hidden_layers" else max(tensors, _HARMLESS)
        if isinstance(value, int) and value < 0 and _LAYERS.fullmatch(key):
            raise CheckpointError(f"`{key}` is {value}; it is a number above 0", file=config.file)
        if isinstance(value, int) and (key in _STAGES or _COUNT.fullmatch(key)) and value > limit:
            raise CheckpointError(f"`{key}` is {value}, the checkpoint has {tensors} tensors", file=config.file)


def without_layers(content: Mapping[str, Any]) -> str | None:
    """The key by which a config, or a part of it, says that a stack has no layers; None where none does."""
    for key, value in _named(content):
        if isinstance(value, dict) and (found := without_layers(value)) is not None:
            return found
        if type(value) is int and value == 0 and _LAYERS.fullmatch(key):
            return key
    return None


def _named(content: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """The entries by names: a config in memory has numbers as keys too, in `id2label` and in what a user adds."""
    return ((str(key), value) for key, value in content.items())


def _sum(value: object) -> int:
    """The sum of the integers in nested lists."""
    if isinstance(value, list):
        return sum(map(_sum, value))
    return value if isinstance(value, int) else 0


def _with_floats(content: dict[str, Any]) -> dict[str, Any]:
    """config.json with the floats that JSON lacks, which transformers writes as `{"__float__": "Infinity"}`."""
    read: dict[str, Any] = json.loads(
        json.dumps(content), object_hook=lambda found: float(found["__float__"]) if "__float__" in found else found
    )
    return read


def _model_class(config: Config, config_class: type) -> type:
    import transformers

    if config.architecture is None:
        # Some configs have several base classes, the plainest first.
        base: Any = transformers.MODEL_MAPPING[config_class]
        plainest: type = base[0] if isinstance(base, tuple) else base
        return plainest
    found = getattr(transformers, config.architecture, None)
    if found is None and config.architecture.endswith("ForCausalLM"):
        # Flax calls every such head ForCausalLM; torch's BERT one is BertLMHeadModel.
        found = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(config_class, None)
    if not isinstance(found, type) or getattr(found, "config_class", None) is not config_class:
        family = config_class.__name__.removesuffix("Config")
        known = [name for name in dir(transformers) if re.fullmatch(rf"{family}(Model|LMHeadModel|For\w+)", name)]
        raise CheckpointError(
            f"unknown architecture {config.architecture!r}{nearest(config.architecture, known)}; "
            f"known for {config.model_type!r}: {', '.join(known)}",
            file=config.file,
        )
    return found


def check(
    tensors: Mapping[str, TensorInfo], architecture: Architecture, table: RuleTable, empty: str | None = None
) -> None:
    """Refuses torch `tensors` (by the names the rules know) with a weight missing, left over, or of another shape.

    Modules that the architecture lacks altogether (a pooler, another head) are no error: hub checkpoints have them.
    Layers are, where the config's key `empty` says that there are none.
    """
    prefix = f"{architecture.base}."
    wanted = {name.removeprefix(prefix): shape for name, shape in architecture.shapes.items()}
    there = {name.removeprefix(prefix): info for name, info in tensors.items()}
    for name, info in there.items():
        if name in wanted and info.shape != wanted[name]:
            raise CheckpointError(
                f"has shape {info.shape}, {architecture.name} with this config needs {wanted[name]}; "
                "correct config.json or the weights",
                file=info.file or None,
                tensor=info.name,
            )
    missing = [name for name in architecture.shapes if name.removeprefix(prefix) not in there]
    missing = [name for name in missing if not table.is_buffer(name) and not _implied(name, architecture, table)]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        message = f"is missing{more}, and {architecture.name} needs it{nearest(missing[0], tensors)}; add it"
        raise CheckpointError(message, file=_file(tensors), tensor=missing[0])
    used = {_rule_number(name, table) for name in architecture.shapes}
    for name, info in there.items():
        if empty is not None and name not in wanted and any(part.isdecimal() for part in name.split(".")):
            raise CheckpointError(
                f"is left over: `{empty}` is 0 in config.json; correct that or remove the tensor",
                file=info.file or None,
                tensor=info.name,
            )
        if (
            name not in wanted
            and _rule_number(info.name, table) in used
            and not _implied(info.name, architecture, table)
        ):
            message = f"is left over: {architecture.name} with this config has no such weight{nearest(name, wanted)}"
            raise CheckpointError(
                f"{message}; correct config.json or remove it", file=info.file or None, tensor=info.name
            )


def _implied(name: str, architecture: Architecture, table: RuleTable) -> bool:
    """Whether `name` is a repeat of another weight, so that a checkpoint may leave it out."""
    tie = table.tie(name)
    return tie is not None and (architecture.tie or tie[0].kind == TIED_ALWAYS or table.torch_rule(name) is None)


def _rule_number(name: str, table: RuleTable) -> int | None:
    found = table.torch_rule(name)
    return None if found is None else found[0].number


def _file(tensors: Mapping[str, TensorInfo]) -> str | None:
    return next((info.file for info in tensors.values() if info.file), None)
