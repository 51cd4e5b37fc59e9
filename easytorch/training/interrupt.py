"""Ctrl-C and SIGTERM end a run after the step it is in, with a checkpoint."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

# A process receives Ctrl-C twice: from the terminal, and from torchrun, which forwards it.
SAME_REQUEST_SECONDS = 2.0


class StopOnSignal:
    """A context in which SIGINT or SIGTERM sets `asked`; a second one, seconds later, has its former effect."""

    def __init__(self) -> None:
        self.asked = False
        self._asked_at = 0.0
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopOnSignal:
        for name in (signal.SIGINT, signal.SIGTERM):
            self._former[name] = signal.signal(name, self._ask)
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def asked_within(self, seconds: float) -> bool:
        """Whether a signal has arrived, or arrives within that many seconds."""
        until = time.monotonic() + seconds
        while not self.asked and time.monotonic() < until:
            time.sleep(0.05)
        return self.asked

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked and time.monotonic() - self._asked_at > SAME_REQUEST_SECONDS:
            self._restore()
            signal.raise_signal(number)
        elif not self.asked:
            self.asked, self._asked_at = True, time.monotonic()

    def _restore(self) -> None:
        for name, handler in self._former.items():
            signal.signal(name, handler)
        self._former.clear()
