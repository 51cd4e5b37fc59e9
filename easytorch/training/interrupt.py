"""Ctrl-C and SIGTERM end a run after the step it is in, with a checkpoint."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any


class StopOnSignal:
    """Within the context the first SIGINT or SIGTERM sets `asked`; a second one acts as it did outside."""

    def __init__(self) -> None:
        self.asked = False
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopOnSignal:
        for name in (signal.SIGINT, signal.SIGTERM):
            self._former[name] = signal.signal(name, self._ask)
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self._restore()

    def _restore(self) -> None:
        for name, handler in self._former.items():
            signal.signal(name, handler)
        self._former.clear()
