"""Random small configs of a family, and the weights that transformers and the bridge give a class with one of them."""

from __future__ import annotations

import dataclasses
import inspect
import json
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from easytorch.bridge.core.config import Config
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.names.architecture import UNBUILDABLE, Architecture, architecture_like, architecture_of
from easytorch.bridge.names.flax_convention import model_rows
from easytorch.bridge.names.outlines.fields import ACTIVATIONS, ANGLES, LABELS
from easytorch.bridge.rules.table import BUFFER, TIES
from easytorch.bridge.rules.transforms import get_transform

Settings = dict[str, Any]

# Multiples of 8, so that heads divide them.
_SIZES = (16, 24, 32, 40, 48, 56, 64, 72, 80, 88)
# Keys whose values must be small or of a kind; by what a key ends with.
_ENDINGS: Mapping[str, tuple[Any, ...]] = {
    "vocab_size": (97, 101, 103, 107),
    "image_size": (32, 48, 64),
    "patch_size": (8, 16),
    "num_channels": (1, 3),
    "key_value_heads": (1, 2),
    "_heads": (2, 4, 8),
    "num_heads": (2, 4, 8),
    "n_head": (2, 4, 8),
    "layers": (1, 2, 3),
    "n_layer": (1, 2, 3),
    "head_dim": (4, 12, 16),
    "rotary_dim": (4, 2),
    "num_experts": (2, 3, 4),
    "num_local_experts": (2, 3, 4),
    "num_experts_per_tok": (1, 2),
    "num_buckets": (8, 16),
}
# What transformers knows in places of a text; elsewhere it is held at its default.
_WORDS: Mapping[str, tuple[str, ...]] = {"feed_forward_proj": ("relu", "gated-gelu", "gated-silu", "gated-relu")}


# What a config says of ties, whether or not its class declares it.
TIE = "tie_word_embeddings"
# Kinds of keys that are lists.
LISTS = ("each", "turns")
# Keys of `COMMON` that every config class has.
_OF_ALL = frozenset(("architectures", "transformers_version", "dtype", "id2label", "label2id"))
# Of `COMMON`: what no model reads is drawn too, to see that it is so.
_UNREAD: Mapping[str, Any] = {
    "max_length": 7,
    "num_beams": 4,
    "top_k": 50,
    "task_specific_params": {"summarization": {"num_beams": 4, "num_layers": 90}},
    "output_past": True,
    "gradient_checkpointing": False,
    "n_positions": 40,
    "n_ctx": 56,
    "position_embedding_type": "absolute",
    "decoder_start_token_id": 2,
    "classif_dropout": 0.1,
    "activation_dropout": 0.3,
    "torch_dtype": "float16",
    "transformers_version": "4.2.0",
    "use_cache": True,
    "initializer_range": 0.03,
    "pruned_heads": {},
    "bos_token_id": 1,
    "add_bias_logits": False,
    "dropout": 0.2,
    "add_cross_attention": False,
    "add_final_layer_norm": True,
    "cross_attention_hidden_size": None,
    "extra_pos_embeddings": 2,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "normalize_before": True,
    "normalize_embedding": False,
    "static_position_embeddings": True,
    "tie_encoder_decoder": False,
    "tie_word_embeddings": True,
    "tf_legacy_loss": False,
}

_ANGLES = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
# A way to stretch rotary angles -> what it needs.
STRETCHED: Mapping[str, Mapping[str, Any]] = {
    kind: {key: value for key, value in _ANGLES.items() if key in needed} | {"rope_type": kind}
    for kind, needed in ANGLES.items()
}


# The words in lists with an entry a layer: `["full_attention", ...]`, `[[["global", "local"], 12]]`.
_LAYERS = ("full_attention", "sliding_attention")
_TURNS = ("global", "local")


@dataclass(frozen=True)
class Key:
    """A key of a family's config.json, dotted in a part's, and the values that are tried."""

    name: str
    default: Any
    kind: str
    values: tuple[Any, ...]

    @property
    def numbers(self) -> tuple[Any, ...]:
        """The values that are not None."""
        return tuple(value for value in self.values if value is not None)

    @property
    def past_tables(self) -> bool:
        """Whether the default is a token that no small vocabulary has."""
        tokens = self.default if isinstance(self.default, list) else [self.default]
        return self.kind in ("token", "tokens") and any(one is not None and one > 90 for one in tokens)


@dataclass(frozen=True)
class Built:
    """A class built from a config: `values` of the config that was made, rows of its table, ties by name."""

    values: Settings
    rows: tuple[tuple[str, str | None, str, tuple[int, ...] | None], ...]
    ties: tuple[tuple[str, str], ...]
    base: str
    apart: bool
    tie: bool


class Sampler:
    """The configs of one family."""

    def __init__(self, model_type: str) -> None:
        self.model_type = model_type
        self.config_class: Any = transformers.CONFIG_MAPPING[model_type]
        self.keys = {key.name: key for key in _keys(self.config_class, "")}
        self.parts = [f"{name}." for name in _parts(self.config_class)]
        default: Any = transformers.MODEL_MAPPING[self.config_class]
        self.default = (default[0] if isinstance(default, tuple) else default).__name__
        self.module = sys.modules[getattr(transformers, self.default).__module__]
        members = inspect.getmembers(self.module, inspect.isclass)
        self.classes = [name for name, found in members if self._is_class(found)]

    def _is_class(self, found: type) -> bool:
        return (
            issubclass(found, PreTrainedModel)
            and found.config_class is self.config_class
            and found.forward is not PreTrainedModel.forward
        )

    def small(self) -> Settings:
        """The first value of each size."""
        sizes = iter(_SIZES * 20)
        firsts = {
            key.name: next(sizes) if key.numbers == _SIZES else key.numbers[0]
            for key in self.keys.values()
            if key.kind in ("size", "maybe") and key.numbers and key.default is not None
        }
        generator = random.Random(0)
        firsts |= {key.name: generator.choice(key.numbers) for key in self.keys.values() if key.past_tables}
        return firsts | self._lists(firsts, generator)

    def drawn(self, generator: random.Random, held: Mapping[str, Any] = {}, often: float = 0.75) -> Settings:
        """One of each key's values, sizes all different, the default of a switch `often`; `held` ones as they are."""
        sizes = iter(generator.sample(_SIZES * 3, len(_SIZES) * 3))
        settings: Settings = {}
        for key in self.keys.values():
            if key.name in held:
                if held[key.name] is not None:
                    settings[key.name] = held[key.name]
            elif key.numbers == _SIZES and (key.kind == "size" or generator.random() < often):
                settings[key.name] = next(sizes)
            elif key.past_tables:
                settings[key.name] = generator.choice(key.numbers)
            elif key.values and (key.kind == "size" or generator.random() > often):
                value = generator.choice(key.values)
                if value is not None or key.kind == "maybe":
                    settings[key.name] = value
        for key in self.keys:
            if key.endswith("rope_parameters") and generator.random() < 0.2:
                settings |= generator.choice(
                    (
                        {key: {**_ANGLES, "rope_theta": 10000.0}},
                        {key: {"rope_type": "default", "rope_theta": 10000.0}},
                        {key.replace("rope_parameters", "rope_scaling"): _ANGLES},
                        {key.replace("rope_parameters", "rope_theta"): 500.0},
                    )
                )
        settings |= self._lists(settings, generator)
        settings |= {
            f"{start}{key}": value
            for start in ("", *self.parts)
            for key, value in _UNREAD.items()
            if f"{start}{key}" not in self.keys and generator.random() < 0.2
        }
        if generator.random() < 0.5:
            settings["id2label"] = {str(one): f"label {one}" for one in range(generator.randrange(1, 6))}
        return settings

    def _lists(self, settings: Settings, generator: random.Random) -> Settings:
        """Lists with one entry per layer, for this many layers."""
        made: Settings = {}
        for key in self.keys.values():
            if key.kind not in LISTS:
                continue
            count = settings.get(self.count_of(key), self.keys[self.count_of(key)].default)
            if key.kind == "turns":
                single = [[_TURNS[:1], 1]] if count % 2 else []
                made[key.name] = [[_TURNS, count // 2], *single] if count > 1 else single
            elif generator.random() < 0.5:
                made[key.name] = [generator.choice(key.values) for _ in range(count)]
        return made

    def with_lists(self, settings: Settings) -> Settings:
        """The same, its lists as long as it has layers."""
        others = {
            name: value
            for name, value in settings.items()
            if name not in self.keys or self.keys[name].kind not in LISTS
        }
        return others | self._lists(others, random.Random(0))

    def count_of(self, key: Key) -> str:
        """The key that counts the entries of a list."""
        start = key.name.rpartition(".")[0]
        start += "." if start else ""
        return next(one for one in (f"{start}num_hidden_layers", f"{start}num_layers") if one in self.keys)

    def config(self, settings: Settings, name: str | None) -> Config:
        """config.json with these settings."""
        content: dict[str, Any] = {"model_type": self.model_type}
        if name is not None:
            content["architectures"] = [name]
        for key, value in settings.items():
            *parts, last = key.split(".")
            inside: Any = content
            for depth, part in enumerate(parts):
                length = self.keys.get(".".join((*parts[: depth + 1], "length")))
                inside = inside.setdefault(part, {} if length is None else self._defaults(parts, length.default))
            inside[int(last) if last.isdecimal() else last] = value
        return Config(Path("config.json"), json.loads(json.dumps(content)))

    def _defaults(self, parts: list[str], length: int) -> list[Any]:
        return [self.keys[".".join((*parts, str(place)))].default for place in range(length)]

    def built(self, settings: Settings, name: str) -> Built | None:
        """The class as transformers builds it; None where it refuses the config."""
        model = self.model(settings, name)
        if model is None:
            return None
        values = {key: _value(model.config, key) for key in self.keys}
        values |= {LABELS: model.config.num_labels, TIE: getattr(model.config, TIE, False)}
        return _built(architecture_like(model), values)

    def buildable(self, settings: Settings, name: str) -> tuple | None:
        """Names, shapes and ties of the model in memory, sooner than `built`; None where the config is refused."""
        model = self.model(settings, name)
        if model is None:
            return None
        shapes = tuple((key, tuple(tensor.shape)) for key, tensor in model.state_dict().items())
        scratch = tuple(key for key, _ in model.named_buffers())
        return shapes, scratch, tuple(model.all_tied_weights_keys.items())

    def model(self, settings: Settings, name: str) -> PreTrainedModel | None:
        """The model on the meta device, None where transformers refuses the config."""
        import torch

        try:
            made = self.config_class.from_dict(self.config(settings, name).content)
            # Of weights without memory the values take most of the time.
            with torch.device("meta"), no_init_weights():
                model = getattr(self.module, name)(made)
            model.tie_weights()  # which goes with the values
            return model
        except (StrictDataclassError, *UNBUILDABLE):
            return None

    def architecture(self, settings: Settings, name: str) -> Architecture | str:
        """The architecture that a conversion finds without an outline, or why it finds none."""
        if not self.public(name):
            model = self.model(settings, name)
            return "cannot be built" if model is None else architecture_like(model)
        try:
            return architecture_of(self.config(settings, name), 100_000)
        except CheckpointError as error:
            return str(error)

    def public(self, name: str) -> bool:
        """Whether it is one of transformers' own names: a config may name the class then."""
        return hasattr(transformers, name)


def _built(architecture: Architecture, values: Settings) -> Built:
    names = architecture.names
    found: list[tuple[str, str | None, str]] = []
    for torch_names, path, kind in model_rows(names):
        kind = kind if isinstance(kind, str) or get_transform(kind.name) is not kind else kind.name
        if len(torch_names) > 1 or isinstance(path, tuple) or not isinstance(kind, str):
            raise ValueError(f"several tensors are one: {torch_names}, {path}")
        found.append((torch_names[0], path, kind))
    # A tie has its weight's shape only where no other row has.
    weights = {name for name, _, kind in found if kind not in TIES}
    rows = []
    for name, path, kind in found:
        shape = architecture.shapes.get(name) if kind not in TIES or name not in weights else None
        if shape is None and kind == BUFFER and name in names.floating:
            shape = ()  # saved by torch, and made anew where a checkpoint lacks it
        rows.append((name, path, kind, shape))
    ties = ((names.hub_name(repeat), names.hub_name(source)) for repeat, source in names.ties.items())
    return Built(values, tuple(rows), tuple(ties), names.model.base_model_prefix, names.has_base, architecture.tie)  # type: ignore[arg-type]


def _value(config: PreTrainedConfig, key: str) -> Any:
    found: Any = config
    for part in key.split("."):
        if isinstance(found, list | tuple):
            found = len(found) if part == "length" else found[int(part)]
        else:
            found = getattr(found, part, None)
    return found


def _parts(config_class: Any) -> dict[str, Any]:
    """The config classes of a composite model's parts; not of those that may be of any family."""
    found = getattr(config_class, "sub_configs", None) or {}
    return {name: part for name, part in found.items() if dataclasses.is_dataclass(part)}


def same_keys(config_class: Any) -> dict[str, str]:
    """Aliases of keys."""
    same = dict(getattr(config_class, "attribute_map", None) or {})
    for name, part in _parts(config_class).items():
        same |= {f"{name}.{other}": f"{name}.{key}" for other, key in same_keys(part).items()}
    return same


def _keys(config_class: Any, start: str) -> Iterator[Key]:
    parts = _parts(config_class)
    if start:
        yield Key(f"{start}model_type", config_class.model_type, "only", ())
    for field in dataclasses.fields(config_class):
        name = f"{start}{field.name}"
        if field.name in parts:
            yield Key(f"{name}_dict", None, "only", ())  # the same in configs of old
            yield from _keys(parts[field.name], f"{name}.")
            continue
        if field.name in _OF_ALL:
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if default is dataclasses.MISSING:
            continue
        if field.name == "layer_types":
            yield Key(name, None, "each", _LAYERS)
        elif field.name == "attention_types":
            yield Key(name, getattr(config_class(), field.name), "turns", _TURNS)
            yield Key(f"{start}attention_layers", None, "each", _TURNS)
        elif isinstance(default, list | tuple) and default and all(type(one) is int and one > 0 for one in default):
            yield Key(f"{name}.length", len(default), "only", ())
            for place, one in enumerate(default):
                yield Key(f"{name}.{place}", one, *_kind(field.name, one, ""))
        else:
            yield Key(name, default, *_kind(field.name, default, str(field.type)))


def _kind(name: str, default: Any, annotation: str) -> tuple[str, tuple[Any, ...]]:
    if isinstance(default, bool):
        return "flag", (default, not default)
    if name.endswith("token_id"):
        return ("tokens" if "list" in annotation else "token"), (None, 3, 5)
    if isinstance(default, int) and "float" not in annotation:
        if default < 1:
            return "only", ()
        ending = next((values for end, values in _ENDINGS.items() if name.endswith(end)), None)
        sizes = ending or (_SIZES if default >= 16 else (default, default + 1, default + 2))
        return ("maybe", (None, *sizes)) if "None" in annotation else ("size", sizes)
    if default is None and "int" in annotation and "float" not in annotation and "list" not in annotation:
        ending = next((values for end, values in _ENDINGS.items() if name.endswith(end)), _SIZES[:4])
        return "size", (None, *ending)
    if isinstance(default, int | float):
        chance = 0 <= default <= 1 and any(word in name for word in ("drop", "prob", "pdrop"))
        return ("share" if chance else "number"), (float(default), 0.5)
    if isinstance(default, str):
        if default in ACTIVATIONS:
            return "activation", (default, "gelu", "relu", "silu")
        words = _WORDS.get(name, ())
        return ("word", words) if words else ("only", ())
    return "only", ()
