"""The tokenizer beside a checkpoint as GGUF metadata: SentencePiece's `tokenizer.model`, else `tokenizer.json`.

Source: llama.cpp's `convert_hf_to_gguf.py` (`_set_vocab_*`) and llama-vocab.cpp. That script identifies a
pre-tokenizer by a hash of its own test sentence; here it is identified by the pattern in tokenizer.json.
"""

from __future__ import annotations

import base64
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from easytorch.bridge.core.config import Config, settings_of
from easytorch.bridge.core.json_files import read_json
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.gguf_files.sentencepiece_model import BPE, read_vocabulary

if TYPE_CHECKING:
    from gguf import GGUFWriter

_LIMIT = 256 << 20
_SENTENCEPIECE = ("tokenizer.model", "spiece.model")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
# Of a token that was added; no merge ever makes it.
_ADDED = -1000.0
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
# Pre-tokenizer pattern in tokenizer.json -> llama.cpp's name for it.
_WORDS = {
    ("ByteLevel",): "gpt-2",
    ("Split", _GPT2_PATTERN): "gpt-2",
    ("Split", _LLAMA3_PATTERN): "llama-bpe",
    ("Split", _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")): "qwen2",
    ("Digits", "each", "ByteLevel"): "starcoder",
    ("Split", " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"): "bloom",
}


class _Type(IntEnum):
    """llama.cpp's token types, which are SentencePiece's."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass
class _Tokens:
    """A vocabulary, filled up to the model's size with tokens nobody uses."""

    size: int
    texts: list[str] = field(init=False)
    scores: list[float] = field(init=False)
    types: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.texts = [f"[PAD{number}]" for number in range(self.size)]
        self.scores = [-10000.0] * self.size
        self.types = [int(_Type.UNUSED)] * self.size

    def set(self, number: int, text: str, score: float, kind: int) -> None:
        """Tokens beyond the model's embeddings are left out: it has no row for them."""
        if 0 <= number < self.size:
            self.texts[number], self.scores[number], self.types[number] = text, score, kind

    def add(self, number: int, text: str, *, special: bool) -> None:
        """A token added to the vocabulary, which is matched before anything else."""
        seems = text.startswith(("<|", "<\N{FULLWIDTH VERTICAL LINE}")) or re.fullmatch(r"<(pad|mask|unused.*)>", text)
        kind = _Type.CONTROL if special or seems else _Type.USER_DEFINED
        self.set(number, text if kind is _Type.CONTROL else text.replace(_SPACE, " "), _ADDED, kind)


def add_tokenizer(writer: GGUFWriter, config: Config) -> None:
    """Adds the tokenizer in the folder of `config`, or says that there is none."""
    import gguf

    settings = settings_of(config)
    folder, tokens = config.file.parent, _Tokens(settings.vocab_size)
    pieces = next((folder / name for name in _SENTENCEPIECE if (folder / name).is_file()), None)
    described = folder / "tokenizer.json"
    content = read_json(described, limit=_LIMIT) if described.is_file() else {}
    merges = False
    try:
        if pieces is not None:
            _from_pieces(writer, pieces, tokens)
        elif content:
            merges = _from_json(writer, content, tokens)
        else:
            writer.add_tokenizer_model("none")
        for token in content.get("added_tokens", []):
            tokens.add(token["id"], token["content"], special=token["special"])
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise CheckpointError(f"is no tokenizer that GGUF can hold ({error!r})", file=pieces or described) from error
    if getattr(settings, "type_vocab_size", None):
        writer.add_token_type_count(settings.type_vocab_size)
    writer.add_token_list(_words(tokens) if content.get("model", {}).get("type") == "WordPiece" else tokens.texts)
    writer.add_token_scores(tokens.scores)
    writer.add_token_types(tokens.types)
    gguf.SpecialVocab(folder, load_merges=merges, n_vocab=tokens.size).add_to_gguf(writer, quiet=True)


def _from_pieces(writer: GGUFWriter, file: Path, tokens: _Tokens) -> None:
    vocabulary = read_vocabulary(file)
    writer.add_tokenizer_model("llama" if vocabulary.model_type == BPE else "t5")
    writer.add_tokenizer_pre("default")
    for number, piece in enumerate(vocabulary.pieces):
        tokens.set(number, *piece)
    writer.add_add_space_prefix(vocabulary.dummy_prefix)
    if vocabulary.model_type != BPE:
        writer.add_remove_extra_whitespaces(vocabulary.remove_spaces)
        if vocabulary.charsmap:
            writer.add_precompiled_charsmap(vocabulary.charsmap)


def _from_json(writer: GGUFWriter, content: dict[str, Any], tokens: _Tokens) -> bool:
    """Whether the vocabulary's merges go along."""
    model = content["model"]
    kind = model["type"]
    if kind == "Unigram":
        writer.add_tokenizer_model("t5")
        writer.add_tokenizer_pre("default")
        for number, (text, score) in enumerate(model["vocab"]):
            tokens.set(number, text, score, _Type.UNKNOWN if number == model.get("unk_id") else _kind(text))
        if charsmap := _of_type(content.get("normalizer"), "Precompiled").get("precompiled_charsmap"):
            writer.add_precompiled_charsmap(base64.b64decode(charsmap))
        return False
    if kind not in ("BPE", "WordPiece"):
        raise CheckpointError(f"a tokenizer of type {kind!r} is none that llama.cpp has", tensor=None)
    pieces = bool(model.get("byte_fallback"))
    ranks = _ranks(model.get("merges", [])) if pieces else {}
    for text, number in model["vocab"].items():
        unknown = pieces and text == model.get("unk_token")
        # SentencePiece's own BPE scores: the earlier a piece is merged, the higher.
        score = -float(ranks.get(text, len(ranks))) if pieces else 0.0
        tokens.set(number, text, score, _Type.UNKNOWN if unknown else _kind(text) if pieces else _Type.NORMAL)
    if kind == "WordPiece":
        writer.add_tokenizer_model("bert")
        writer.add_tokenizer_pre("bert-bge")
        return False
    writer.add_tokenizer_model("llama" if pieces else "gpt2")
    writer.add_tokenizer_pre("default" if pieces else _words_of(content))
    if pieces:
        writer.add_add_space_prefix(bool(_prepends(content)))
    return True


def _kind(text: str) -> int:
    return _Type.BYTE if _BYTE.fullmatch(text) else _Type.NORMAL


def _ranks(merges: Sequence[Any]) -> dict[str, int]:
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault("".join(merge.split(" ") if isinstance(merge, str) else merge), rank)
    return ranks


def _prepends(content: dict[str, Any]) -> bool:
    """Whether a space is put before the text: by a normalizer of old files or the pre-tokenizer of new ones."""
    metaspace = _of_type(content.get("pre_tokenizer"), "Metaspace")
    return bool(_of_type(content.get("normalizer"), "Prepend")) or metaspace.get("prepend_scheme", "never") != "never"


def _steps(step: Any) -> list[dict[str, Any]]:
    """The steps of a tokenizer's normalizer or pre-tokenizer, in order."""
    if not step:
        return []
    inner = step.get("normalizers") or step.get("pretokenizers")
    return [one for part in inner for one in _steps(part)] if inner else [step]


def _of_type(step: Any, kind: str) -> dict[str, Any]:
    return next((one for one in _steps(step) if one.get("type") == kind), {})


def _words_of(content: dict[str, Any]) -> str:
    """llama.cpp's name of the pre-tokenizer; its default, with a warning, where it has none."""
    steps = _steps(content.get("pre_tokenizer"))
    key: tuple[str, ...] = ()
    for step in steps:
        if step["type"] == "Split":
            key += ("Split", step["pattern"].get("Regex", ""))
        elif step["type"] == "Digits":
            key += ("Digits", "each" if step.get("individual_digits") else "runs")
        elif step["type"] != "ByteLevel" or step.get("use_regex", True):
            key += (step["type"],)
    if key in _WORDS:
        return _WORDS[key]
    warnings.warn(
        f"llama.cpp's way of cutting text as this tokenizer does ({key}) is not known here; tokenizer.ggml.pre says "
        f"'default', set it to the right one where tokens differ",
        stacklevel=2,
    )
    return "default"


def _words(tokens: _Tokens) -> list[str]:
    """WordPiece's tokens as llama.cpp has them: word starts are marked instead of continuations."""
    return [
        text if kind == _Type.CONTROL else text[2:] if text.startswith("##") else _SPACE + text
        for text, kind in zip(tokens.texts, tokens.types, strict=True)
    ]
