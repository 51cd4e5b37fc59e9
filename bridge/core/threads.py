"""Threads whose work ends where their block ends, also when Ctrl-C comes while it is waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from easytorch.bridge.core.context_manager import ContextManager
from easytorch.bridge.core.interruptions import INTERRUPTIONS, uninterrupted

if TYPE_CHECKING:
    from concurrent.futures import Future

Made = TypeVar("Made")


class Threads(ContextManager):
    """A pool none of whose threads is at work when its block is left.

    `ThreadPoolExecutor` leaves them running where its own waiting is interrupted: they would then write to a
    descriptor that is closed, or that another file was given since, or into a folder that is being removed.
    stop: called when the waiting is interrupted, so that it ends soon.
    """

    def __init__(self, count: int, stop: Callable[[], None] | None = None) -> None:
        from concurrent.futures import ThreadPoolExecutor

        self._pool = ThreadPoolExecutor(count)
        self._stop = stop
        self._futures: list[Future[Any]] = []

    def submit(self, function: Callable[..., Made], *arguments: object) -> Future[Made]:
        """`function(*arguments)` on a thread, when one is free."""
        self._futures.append(self._pool.submit(function, *arguments))
        return self._futures[-1]

    def close(self) -> None:
        """Waits for what was begun; the rest is left out."""
        from concurrent.futures import wait

        for future in self._futures:
            future.cancel()
        try:
            # Not for the threads: until Python 3.13 one counts as ended whose `join` was interrupted.
            wait(self._futures)
        except INTERRUPTIONS:
            if self._stop is not None:
                self._stop()
            uninterrupted(lambda: wait(self._futures))
            raise
        finally:
            self._pool.shutdown()
