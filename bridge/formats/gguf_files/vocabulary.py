"""The tokenizer in a GGUF file: copied into another GGUF file, or written as tokenizer.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from gguf import GGUFWriter

_OF_TOKENIZERS = "tokenizer."
_MODEL = "tokenizer.ggml.model"
# What llama.cpp's converter and this one write for a model without a tokenizer.
_NONE = ("none", "no_vocab")
# If one of these stands beside the file, it is the original tokenizer.
_BETTER = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
# What transformers, tokenizers and gguf raise for vocabularies they cannot read.
_UNREADABLE = (ImportError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError, OSError)


def tokenizer_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a file that is its tokenizer; nothing where it has none."""
    if fields.get(_MODEL, _NONE[0]) in _NONE:
        return {}
    return {key: value for key, value in fields.items() if key.startswith(_OF_TOKENIZERS)}


def add_fields(writer: GGUFWriter, fields: Mapping[str, Any], types: Mapping[str, int]) -> None:
    """Adds metadata as `walk` reads it: scalars, lists of text, numpy arrays of numbers. types: of scalars, by key."""
    from gguf import GGUFValueType

    kinds = {
        "bool": GGUFValueType.BOOL,
        "float32": GGUFValueType.FLOAT32,
        "float64": GGUFValueType.FLOAT64,
        **{
            f"{sign}int{bits}": GGUFValueType[f"{sign}int{bits}".upper()]
            for sign in ("", "u")
            for bits in (8, 16, 32, 64)
        },
    }
    for key, value in fields.items():
        if isinstance(value, np.ndarray) and value.size:
            writer.add_key_value(key, value.tolist(), GGUFValueType.ARRAY, kinds[value.dtype.name])
        elif isinstance(value, list) and value and all(isinstance(text, str) for text in value):
            texts = [text.encode("utf-8", "surrogateescape") for text in value]
            writer.add_key_value(key, texts, GGUFValueType.ARRAY, GGUFValueType.STRING)
        elif isinstance(value, bool | int | float | str):
            writer.add_key_value(key, value, GGUFValueType(types[key]))


def write_tokenizer(file: Path, fields: Mapping[str, Any], folder: Path) -> str | None:
    """Writes the file's tokenizer into `folder` as transformers reads it there; why not, where that cannot be done.

    Nothing is written for a file without one, or where the folder has one already.
    """
    if not tokenizer_fields(fields) or any((folder / name).is_file() for name in _BETTER):
        return None
    try:
        from transformers import PreTrainedTokenizerFast

        PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    except _UNREADABLE as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        return f"the tokenizer in {file.name} is not carried: {reason}"
    return None
