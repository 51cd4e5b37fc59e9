"""Folders of PEFT's adapters, checked as a whole before a layer of the model is touched.

PEFT and transformers take adapter_config.json as it comes: what is wrong in it is an error of Python's somewhere below.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from easytorch.bridge.core.json_files import read_json
from easytorch.bridge.errors import CheckpointError, nearest
from easytorch.protocol.adapters import require_peft
from easytorch.protocol.checkpoint_files import check_weight_file

CONFIG, SAFETENSORS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_CONFIG_LIMIT = 1 << 26
_REPAIR = "save the adapter again"
# Integers in PEFT's annotations that scale what the adapter adds, and may be fractions.
_SCALES = ("lora_alpha", "alpha")
_PISSA = re.compile(r"pissa_niter_\d+")


def check_adapter_folder(folder: Path, *, config: bool = True, weights: bool = True) -> None:
    """`CheckpointError` where adapter_config.json says nothing that PEFT can make an adapter of, or the file of
    weights is missing or damaged.

    config, weights: whether these are read from the folder, and not given by the caller.
    """
    if config:
        check_adapter_config(read_json(folder / CONFIG, limit=_CONFIG_LIMIT), folder / CONFIG)
    if not weights:
        return
    files = [folder / name for name in (SAFETENSORS, PICKLE) if (folder / name).is_file()]
    if not files:
        raise CheckpointError(f"has neither {SAFETENSORS} nor {PICKLE}; {_REPAIR}", file=folder)
    check_weight_file(files[0])


def check_adapter_config(content: Mapping[str, Any], file: Path) -> None:
    """`CheckpointError` for a setting of another type than PEFT declares, and for a kind of adapter that layers do not
    carry; unknown settings, of a later PEFT, are left to PEFT, which warns.
    """
    peft = require_peft()
    known = {str(kind.value): made for kind, made in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    kind = content.get("peft_type")
    if kind is None:
        raise CheckpointError("has no peft_type, which is 'LORA' for LoRA; restore the file", file=file)
    if kind not in known:
        close = nearest(kind, known) if isinstance(kind, str) else ""
        raise CheckpointError(f"peft_type={kind!r} is none that PEFT {peft.__version__} has{close}", file=file)
    made: Any = known[kind]
    if issubclass(made, peft.config.PromptLearningConfig):
        raise CheckpointError(f"is of {kind}, whose prompts stand in no layer; load it by peft.PeftModel", file=file)
    hints: dict[str, Any] = typing.get_type_hints(made)
    for field in dataclasses.fields(made):
        if field.name in content and not _fits(content[field.name], field, hints[field.name]):
            given = f"{field.name}={content[field.name]!r} must be {_words(hints[field.name])}"
            raise CheckpointError(f"{given}; {_REPAIR}", file=file)
    _check_numbers(content, file)
    for name in ("target_modules", "exclude_modules"):
        if isinstance(content.get(name), str):
            try:
                re.compile(content[name])
            except re.error as error:
                raise CheckpointError(
                    f"{name}={content[name]!r} is no regular expression: {error}", file=file
                ) from error


def _check_numbers(content: Mapping[str, Any], file: Path) -> None:
    """Ranks are integers of at least 1 and alphas numbers, those of single layers too."""
    for name, of_layers, fits, words in (
        ("r", "rank_pattern", _is_rank, "an integer of at least 1"),
        ("lora_alpha", "alpha_pattern", _is_finite, "a finite number"),
    ):
        if name in content and not fits(content[name]):
            raise CheckpointError(f"{name}={content[name]!r} must be {words}; {_REPAIR}", file=file)
        pattern = content.get(of_layers, {})
        if not isinstance(pattern, dict) or not all(map(fits, pattern.values())):
            raise CheckpointError(f"{of_layers}={pattern!r} must give layers {words}; {_REPAIR}", file=file)


def _is_rank(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value)


def _fits(value: Any, field: Any, hint: Any) -> bool:
    if value is None and field.default is None:
        return True
    if hint is int and field.name in _SCALES:
        hint = float
    return _is(value, hint)


def _is(value: Any, hint: Any) -> bool:
    """Whether a value of JSON is of the type `hint`; objects stand for dataclasses, and null for a bool too."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_is(value, one) for one in inner)
    if origin is typing.Literal:
        return value in inner or (isinstance(value, str) and bool(_PISSA.fullmatch(value)))
    if origin in (list, set):
        return isinstance(value, list) and all(_is(one, inner[0]) for one in value)
    if origin is tuple:
        return isinstance(value, list) and len(value) == len(inner) and all(map(_is, value, inner))
    if origin is dict:
        return isinstance(value, dict) and all(_is(one, inner[1]) for one in value.values())
    if hint is bool:
        return value is None or isinstance(value, bool)
    if hint in (int, float):
        return _is_number(value) and (hint is float or isinstance(value, int))
    if hint in (str, list, dict, type(None)):
        return isinstance(value, hint)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return isinstance(value, str)
    return value is None or isinstance(value, dict) if dataclasses.is_dataclass(hint) else True


def _words(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_words, inner)))
    if origin is typing.Literal:
        return " or ".join(map(repr, inner))
    if origin in (list, set, tuple):
        return f"a list of {_words(inner[0])}"
    if origin is dict or hint is dict or dataclasses.is_dataclass(hint):
        return "an object"
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return "str"
    return "null" if hint is type(None) else getattr(hint, "__name__", str(hint))
