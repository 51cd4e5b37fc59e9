"""tensorstore's writes in flight: they are bounded, and none outlives the code that began it.

tensorstore makes the folders that a file needs, on threads of its own: a write that ended after its folder was removed
would bring the folder back.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from easytorch.bridge.core.blocks import contiguous
from easytorch.bridge.core.context_manager import ContextManager
from easytorch.bridge.core.interruptions import uninterrupted

# Bytes of chunk copies that may be pending.
_PENDING_BYTES = 64 << 20


def finished(future: Any) -> Any:
    """The result of a `tensorstore.Future`; waits for the write to end even if interrupted."""
    try:
        return future.result()
    finally:
        _wait_for(future)


def _wait_for(future: Any) -> None:
    if not future.done():
        uninterrupted(future.exception)


class PendingWrites(ContextManager):
    """Writes in flight, at most `_PENDING_BYTES` of them; none is when the context is left, also by an error."""

    def __init__(self) -> None:
        self._futures: deque[tuple[Any, int]] = deque()
        self._bytes = 0

    def array(self, store: Any, array: np.ndarray, chunk: tuple[int, ...]) -> None:
        """Writes one array chunk by chunk, so that only chunks are copied.

        Never several chunks at once: the write of a box ends with the first chunk that fails, before the others do.
        """
        for start in np.ndindex(*(-(-size // step) for size, step in zip(array.shape, chunk, strict=True))):
            window = tuple(slice(at * step, (at + 1) * step) for at, step in zip(start, chunk, strict=True))
            block = contiguous(array[window])
            box = tuple(slice(one.start, min(one.stop, size)) for one, size in zip(window, array.shape, strict=True))
            self.add(store[box].write(block), block.nbytes)

    def add(self, future: Any, size: int) -> None:
        """Takes a write (`tensorstore.WriteFutures`) of `size` bytes, whose source may change when this returns."""
        self._futures.append((future, size))
        self._bytes += size
        future.copy.result()
        while self._bytes > _PENDING_BYTES:
            self._wait()

    def _wait(self) -> None:
        future, size = self._futures[0]
        future.result()
        self._futures.popleft()
        self._bytes -= size

    def finish(self) -> None:
        """Waits for all; the error of the first that failed is raised."""
        while self._futures:
            self._wait()

    def close(self) -> None:
        """Waits for those that an error left in flight; what they met adds nothing to it."""
        uninterrupted(self._wait_for_all)

    def _wait_for_all(self) -> None:
        while self._futures:
            _wait_for(self._futures[0][0])
            self._futures.popleft()
