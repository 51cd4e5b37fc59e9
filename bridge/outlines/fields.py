"""What config.json may say for an outline to answer: each key with its default, and the values that are understood.

Narrower than transformers is: a value that is refused here is not wrong, it is left to transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# The default of a key that a config must have, as transformers computes it from others or changes it with versions.
UNKNOWN = object()
# Of a settings' mapping, not of config.json: how many outputs a classifier has.
LABELS = "num_labels"

_LARGEST = 1 << 31
_ACTIVATIONS = frozenset(("gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu", "swish", "tanh"))
_DTYPES = frozenset(("float32", "float16", "bfloat16"))


@dataclass(frozen=True)
class Field:
    """A key of config.json: what stands for it where it is absent, and which values are understood."""

    default: Any
    accepts: Callable[[Any], bool]


def size(default: Any = UNKNOWN) -> Field:
    """A dimension or a count, at least 1; an absent one is None where `default` is."""
    return Field(default, lambda value: (_natural(value) and value > 0) or (value is None and default is None))


def flag(default: bool) -> Field:
    """True or false."""
    return Field(default, lambda value: type(value) is bool)


def only(value: Any) -> Field:
    """A setting with one value that is understood."""
    return Field(value, lambda given: type(given) is type(value) and given == value)


def number(default: float | None = None) -> Field:
    """A number above zero, with a point; weights do not depend on it."""
    return Field(default, lambda value: type(value) is float and 0 < value < math.inf)


def share(default: float | None) -> Field:
    """A probability, of dropout for one."""
    absent = default is None
    return Field(default, lambda value: (type(value) is float and 0 <= value <= 1) or (absent and value is None))


def text(default: str | None = None) -> Field:
    """Words that weights do not depend on."""
    return Field(default, lambda value: type(value) is str or (value is None and default is None))


def one_of(default: str | None, known: frozenset[str]) -> Field:
    """One of some words."""
    return Field(default, lambda value: (type(value) is str and value in known) or (value is None and default is None))


def activation(default: str) -> Field:
    """The name of a nonlinearity."""
    return one_of(default, _ACTIVATIONS)


def token(default: int | None = None) -> Field:
    """The number of a token, or none."""
    return Field(default, lambda value: value is None or _natural(value))


def tokens() -> Field:
    """The number of a token, several, or none."""
    return Field(None, lambda value: value is None or _natural(value) or _naturals(value))


def rotary() -> Mapping[str, Field]:
    """Where rotary angles are the plain ones, as this and as earlier versions of transformers write that."""
    return {
        "rope_parameters": Field(None, lambda value: value is None or _plain_rotary(value)),
        "rope_theta": number(),
        "rope_scaling": Field(None, lambda value: value is None),
    }


def padded(settings: Mapping[str, Any], *rows: str) -> bool:
    """Whether the padding token is a row of the embeddings, of the sizes that `rows` name."""
    pad = settings["pad_token_id"]
    return pad is None or all(pad < settings[key] for key in rows)


def _natural(value: object) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _naturals(value: object) -> bool:
    return type(value) is list and len(value) > 0 and all(map(_natural, value))


def _plain_rotary(value: object) -> bool:
    return (
        type(value) is dict
        and value.keys() == {"rope_theta", "rope_type"}
        and value["rope_type"] == "default"
        and number().accepts(value["rope_theta"])
    )


def _labels(value: object) -> bool:
    return value is None or (
        type(value) is dict
        and len(value) > 0
        and value.keys() == {str(place) for place in range(len(value))}
        and all(type(name) is str for name in value.values())
    )


COMMON: Mapping[str, Field] = {
    "architectures": Field(None, lambda value: True),  # `Config.architecture` reads it
    "model_type": text(),
    "transformers_version": text(),
    "_name_or_path": text(),
    "dtype": one_of(None, _DTYPES),
    "torch_dtype": one_of(None, _DTYPES),
    "use_cache": flag(True),
    "initializer_range": Field(None, lambda value: type(value) is float and 0 < value <= 1),
    "bos_token_id": token(),
    "eos_token_id": tokens(),
    "id2label": Field(None, _labels),
    "label2id": Field(None, lambda value: type(value) is dict and all(type(place) is int for place in value.values())),
    "tie_word_embeddings": flag(False),
}
