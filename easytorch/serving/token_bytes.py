"""The bytes of a token, which may be those of a part of a character."""

from __future__ import annotations

import functools
import re
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def token_bytes(tokenizer: Any, token: int, text: str) -> list[int]:
    """text: the token decoded by itself, which has U+FFFD where its bytes are no UTF-8. Of such a token, the bytes that
    stand in its name: `<0xE2>` (byte fallback), or a letter for each byte (GPT-2's byte level)."""
    if "\ufffd" in text:
        name = tokenizer.convert_ids_to_tokens(token)
        if found := _BYTE.fullmatch(name):
            return [int(found[1], 16)]
        letters = _byte_of_letter()
        if name and all(letter in letters for letter in name):
            return [letters[letter] for letter in name]
    return list(text.encode())


@functools.cache
def _byte_of_letter() -> dict[str, int]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}
