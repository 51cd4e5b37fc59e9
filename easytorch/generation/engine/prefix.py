"""The hashes of the prefix cache: of a full page's tokens and all tokens before them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b


def extend_hashes(hashes: list[bytes], tokens: Sequence[int], page_size: int) -> None:
    """Extends `hashes`, one for each page, to all full pages of `tokens`.

    128 bits of BLAKE2b: a collision can neither be found nor be expected by chance.
    """
    for page in range(len(hashes), len(tokens) // page_size):
        content = array("q", tokens[page * page_size : (page + 1) * page_size])
        before = hashes[-1] if hashes else b""
        hashes.append(blake2b(before + content.tobytes(), digest_size=16).digest())
