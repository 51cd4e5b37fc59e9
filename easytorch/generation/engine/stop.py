"""`StoppedText`: the text of a request, token by token, up to the first of its stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from easytorch.generation.text import TextDecoder


class StoppedText:
    """shown: how many characters may be shown; until the end, without what could become part of a stop string.

    These never change, so that a part of the text can be read later, and by another thread.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], *, include_stop: bool, skip_special_tokens: bool) -> None:
        self._decoder = TextDecoder(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stop, self._include = stop, include_stop
        self._longest = max(map(len, stop), default=1) - 1  # letters of an earlier piece in a stop string
        self._held = 0 if include_stop else self._longest
        # pieces, as a text that grows would be copied for each; `_recent` are the last letters
        self._pieces: list[str] = []
        self._length, self._recent, self._done = 0, "", False

    @property
    def shown(self) -> int:
        return self._length if self._done else max(0, self._length - self._held)

    @property
    def visible(self) -> str:
        return self.part(0, self.shown)

    def part(self, start: int, end: int) -> str:
        """The characters [start, end), of those that are visible; a part at the end reads the last pieces alone."""
        if start == 0:
            return "".join(self._pieces)[:end]
        first, before = len(self._pieces), self._length
        while first and before > start:
            first -= 1
            before -= len(self._pieces[first])
        return "".join(self._pieces[first:])[max(0, start - before) : max(0, end - before)]

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
        if not piece:
            return None
        known, window = len(self._recent), self._recent + piece
        before = self._length - known  # of the window
        self._pieces.append(piece)
        self._length += len(piece)
        self._recent = window[max(0, len(window) - self._longest) :]
        if not search:
            return None
        # the first to begin, of those the longest
        found = []
        for one in self._stop:
            if (place := window.find(one, max(0, known - len(one) + 1))) >= 0:
                found.append((place, -len(one), one))
        if not found:
            return None
        place, _, one = min(found)
        end = before + place + (len(one) if self._include else 0)
        self._pieces, self._length, self._done = [self.part(0, end)], end, True
        return one
