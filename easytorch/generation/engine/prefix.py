"""The hashes by which pages are found again: of a full page's tokens and of everything before them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b


def extend_hashes(hashes: list[bytes], tokens: Sequence[int], page_size: int) -> None:
    """Appends the hashes of the full pages of `tokens` that `hashes`, one a page, lack.

    128 bits of BLAKE2b: two prompts that collide by chance, or that someone could find, do not exist in practice.
    """
    for page in range(len(hashes), len(tokens) // page_size):
        content = array("q", tokens[page * page_size : (page + 1) * page_size])
        before = hashes[-1] if hashes else b""
        hashes.append(blake2b(before + content.tobytes(), digest_size=16).digest())
