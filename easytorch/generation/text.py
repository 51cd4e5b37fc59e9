"""Streaming text: pieces whose concatenation equals decoding all tokens at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from easytorch.generation.decode import generate_tokens
from easytorch.generation.decoders import CausalLM

_BROKEN = "\ufffd"  # what a tokenizer decodes half a UTF-8 character to


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


def decode_incrementally(tokenizer: Any, tokens: Iterable[int]) -> Iterator[str]:
    """The pieces of text that tokens add, one by one; a piece is held back while its last character is incomplete.

    Each token is decoded after those of the previous piece, since a tokenizer treats the first token of a text
    differently (a leading space); a step decodes a few tokens and not the whole text.
    """
    ids: list[int] = []
    start = read = 0  # ids[start:read] were emitted and stand as context, ids[read:] were not

    def decode(part: list[int]) -> str:
        text: str = tokenizer.decode(part, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    for token in tokens:
        ids.append(token)
        context, text = decode(ids[start:read]), decode(ids[start:])
        # a character has at most 4 bytes, and a token at least one: what is still broken after 4 will not be mended
        incomplete = text.endswith(_BROKEN) and len(ids) - read < 4
        if len(text) > len(context) and not incomplete:
            yield text[len(context) :]
            start, read = read, len(ids)
    rest = decode(ids[start:])[len(decode(ids[start:read])) :]
    if rest:
        yield rest
