"""`StoppedText`: the text of a request, token by token, up to the first of its stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from easytorch.generation.text import TextDecoder


class StoppedText:
    """visible: the text that may be shown; until the end, without what could become part of a stop string."""

    def __init__(self, tokenizer: Any, stop: Sequence[str], *, include_stop: bool, skip_special_tokens: bool) -> None:
        self._decoder = TextDecoder(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stop, self._include = stop, include_stop
        self._held = 0 if include_stop or not stop else max(map(len, stop)) - 1
        self._text, self._done = "", False

    @property
    def visible(self) -> str:
        return self._text if self._done or not self._held else self._text[: -self._held]

    def push(self, token: int, *, search: bool) -> str | None:
        """Adds a token's text; the stop string that it completes, where `search`."""
        return self._add(self._decoder.push(token), search)

    def finish(self, *, search: bool) -> str | None:
        """Adds what the last tokens left incomplete, where no stop string has ended the text; nothing is held back
        then."""
        matched = None if self._done else self._add(self._decoder.finish(), search)
        self._done = True
        return matched

    def _add(self, piece: str, search: bool) -> str | None:
        known = len(self._text)
        self._text += piece
        if not search or not piece:
            return None
        # the first to begin, of those the longest
        found = []
        for one in self._stop:
            if (place := self._text.find(one, max(0, known - len(one) + 1))) >= 0:
                found.append((place, -len(one), one))
        if not found:
            return None
        place, _, one = min(found)
        self._text = self._text[: place + (len(one) if self._include else 0)]
        self._done = True
        return one
