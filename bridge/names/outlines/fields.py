"""The keys of config.json that an outline knows, with their defaults, and the values that it understands.

Narrower than transformers: a value that is refused here is not an error, it is left to transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

# The number of a classifier's outputs: a key of an outline's settings, not of config.json.
LABELS = "num_labels"

_LARGEST = 1 << 31
ACTIVATIONS = frozenset(("gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu", "swish", "tanh"))
_DTYPES = frozenset(("float32", "float16", "bfloat16"))


@dataclass(frozen=True)
class Field:
    """A key of config.json: its default, and which values the outline understands."""

    default: Any
    accepts: Callable[[Any], bool]


def size(default: int | None = None) -> Field:
    """A dimension or a count, at least 1, or None if `default` is None."""
    return Field(default, lambda value: (_natural(value) and value > 0) or (value is None and default is None))


def maybe(default: int | None) -> Field:
    """An optional size: None is accepted, whatever the default."""
    return Field(default, lambda value: value is None or (_natural(value) and value > 0))


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
    return one_of(default, ACTIVATIONS)


def token(default: int | None = None) -> Field:
    """The number of a token, or none."""
    return Field(default, lambda value: value is None or _natural(value))


def tokens(default: int | None = None) -> Field:
    """The number of a token, several, or none."""
    return Field(default, lambda value: value is None or _natural(value) or _naturals(value))


def each(default: list[str] | None, known: Collection[str]) -> Field:
    """A word a layer, or none."""
    return Field(default, lambda value: value is None or (_several(value) and all(map(_among(known), value))))


def turns(default: list[Any], known: Collection[str]) -> Field:
    """Words that take turns, with how often: `[[["global", "local"], 12]]`."""

    def is_turn(value: object) -> bool:
        return (
            type(value) is list
            and len(value) == 2
            and _several(value[0])
            and all(map(_among(known), value[0]))
            and _natural(value[1])
        )

    return Field(default, lambda value: _several(value) and all(map(is_turn, value)))


def rotary(start: str = "", known: Collection[str] = ()) -> Mapping[str, Field]:
    """Rotary angles, as this and as earlier versions of transformers write them; weights do not depend on them.

    known: the ways to stretch them that the family's config class takes, all of those below without.
    """
    among = known or ANGLES
    return {
        f"{start}rope_parameters": Field(None, lambda value: value is None or _angles(value, {"rope_theta"}, among)),
        f"{start}rope_theta": number(),
        f"{start}rope_scaling": Field(None, lambda value: value is None or _angles(value, set(), among)),
    }


def _several(value: object) -> bool:
    return type(value) is list and len(value) > 0


def _among(known: Collection[str]) -> Callable[[object], bool]:
    return lambda value: type(value) is str and value in known


def _natural(value: object) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _naturals(value: object) -> bool:
    return type(value) is list and len(value) > 0 and all(map(_natural, value))


# The keys of each way to stretch them.
ANGLES: Mapping[str, Collection[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}


def _angles(value: object, besides: set[str], known: Collection[str]) -> bool:
    """Whether `value` says how rotary angles are made, in one of the `known` ways. besides: further keys it has."""
    if type(value) is not dict:
        return False
    kind = value.get("rope_type")
    if type(kind) is not str or kind not in known or value.keys() != {*ANGLES[kind], *besides, "rope_type"}:
        return False
    numbers = [one for key, one in value.items() if key not in ("rope_type", "original_max_position_embeddings")]
    return (
        all(type(one) is float and 0 < one < math.inf for one in numbers)
        and value.get("factor", 1.0) >= 1
        and value.get("low_freq_factor", 0.0) < value.get("high_freq_factor", 1.0)
        and size(1).accepts(value.get("original_max_position_embeddings", 1))
    )


def _labels(value: object) -> bool:
    return value is None or (
        type(value) is dict
        and len(value) > 0
        and value.keys() == {str(place) for place in range(len(value))}
        and all(type(name) is str for name in value.values())
    )


def _anything(value: object) -> bool:
    return True


# Generation's settings, which older configs hold and transformers takes out.
_OF_GENERATION = (
    "bad_words_ids",
    "begin_suppress_tokens",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_scores",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict_in_generate",
    "suppress_tokens",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
)
# What families of old wrote, or programs around them, and no model reads.
_UNREAD: Mapping[str, Field] = {
    **{key: Field(None, _anything) for key in ("task_specific_params", "finetuning_task", "prefix", "tokenizer_class")},
    **{key: flag(False) for key in ("output_past", "output_attentions", "tie_weights_")},
    **{key: only(False) for key in ("gradient_checkpointing", "torchscript", "use_bfloat16")},
    **{key: size() for key in ("n_positions", "n_ctx")},
    "pruned_heads": only({}),
    "position_embedding_type": only("absolute"),
    # Of fairseq's models, and of the one file they had in transformers.
    **{
        key: flag(False)
        for key in (
            "add_bias_logits",
            "add_final_layer_norm",
            "normalize_before",
            "normalize_embedding",
            "static_position_embeddings",
        )
    },
    "extra_pos_embeddings": size(),
    # Of every config that transformers 4 wrote whole, as it did of a part.
    **{
        key: only(False)
        for key in ("add_cross_attention", "is_decoder", "is_encoder_decoder", "tie_encoder_decoder", "tf_legacy_loss")
    },
    "cross_attention_hidden_size": only(None),
    "decoder_start_token_id": token(),
    "sep_token_id": token(),
    "attn_pdrop": share(None),
    "activation_dropout": share(None),
    "classif_dropout": share(None),
    "dropout": share(None),
}
COMMON: Mapping[str, Field] = {
    **{key: Field(None, _anything) for key in _OF_GENERATION},
    **{key: Field(None, field.accepts) for key, field in _UNREAD.items()},
    "architectures": Field(None, _anything),  # `Config.architecture` reads it
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

# By the names that outlines have for them.
KINDS: Mapping[str, Callable[..., Field]] = {
    "size": size,
    "maybe": maybe,
    "flag": flag,
    "only": only,
    "number": number,
    "share": share,
    "word": lambda default, known: one_of(default, frozenset(known)),
    "each": each,
    "turns": turns,
    "activation": activation,
    "token": token,
    "tokens": tokens,
}
