"""Streaming text: pieces whose concatenation equals decoding all tokens at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from easytorch.generation.decode import generate_tokens
from easytorch.generation.decoders import CausalLM

_BROKEN = "\ufffd"  # what a tokenizer decodes half a UTF-8 character to
LONE_SURROGATE = "a lone surrogate (\\ud800 to \\udfff), which is not a character"
# Tokens of bytes that are no UTF-8 are decoded together up to this many: each is decoded again with the next.
_MOST_HELD = 32


def stream_text(model: CausalLM, tokenizer: Any, prompt: str, **settings: Any) -> Iterator[str]:
    """The continuation of `prompt`, in pieces, never with part of a character: `stream_tokens`, decoded.

    Special tokens are left out.
    """
    return decode_incrementally(tokenizer, stream_tokens(model, tokenizer, prompt, **settings))


def stream_tokens(model: CausalLM, tokenizer: Any, prompt: str, **settings: Any) -> Iterator[int]:
    """The continuation of `prompt`, token by token.

    tokenizer: a transformers tokenizer. settings: those of `generate_tokens`; the end token is the tokenizer's where
    neither `eos_token_id` nor the model's generation config names one.
    """
    inputs = tokenizer(prompt, return_tensors="pt")
    if settings.get("eos_token_id") is None and model.generation_config.eos_token_id is None:
        settings["eos_token_id"] = tokenizer.eos_token_id
    tokens = generate_tokens(model, inputs["input_ids"], inputs.get("attention_mask"), **settings)
    return (int(token[0]) for token in tokens)


def valid_text(text: str) -> bool:
    """False for a lone surrogate, which JSON can encode and no tokenizer can read."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def decode_incrementally(tokenizer: Any, tokens: Iterable[int]) -> Iterator[str]:
    """The pieces of text that tokens add, one by one; special tokens are left out."""
    decoder = TextDecoder(tokenizer)
    for token in tokens:
        if piece := decoder.push(token):
            yield piece
    if rest := decoder.finish():
        yield rest


class TextDecoder:
    """Text of tokens that come one by one; a piece is held back while its last character is incomplete.

    Each token is decoded after those of the previous piece, since a tokenizer treats the first token of a text
    differently (a leading space); a step decodes a few tokens and not the whole text.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._ids: list[int] = []
        # ids[start:read] were emitted and stand as context; of the text of ids[start:], `shown` letters were emitted
        self._start = self._read = self._shown = 0

    def push(self, token: int) -> str:
        """The text that `token` adds, with what was held back; "" while it is incomplete."""
        self._ids.append(token)
        text, held = self._decode(self._ids[self._start :]), len(self._ids) - self._read
        broken = text.endswith(_BROKEN)
        # a character has at most 4 bytes, and a token at least one: of more tokens only the end can be incomplete
        if len(text) <= self._shown or (broken and held < 4):
            return ""
        if broken and held < _MOST_HELD:
            end = len(text) - len(_BROKEN)
            piece, self._shown = text[self._shown : end], max(self._shown, end)
            return piece
        piece = text[self._shown :]
        self._start, self._read = self._read, len(self._ids)
        self._shown = len(self._decode(self._ids[self._start :]))
        return piece

    def finish(self) -> str:
        """The text that is still held back, complete or not."""
        rest = self._decode(self._ids[self._start :])[self._shown :]
        self._start = self._read = len(self._ids)
        self._shown = 0
        return rest

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False)
        return text
