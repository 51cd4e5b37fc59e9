"""glibc's malloc, told to keep the memory that a step frees for the next one."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Of malloc.h. Setting one ends malloc's own adjustment of the thresholds: afterwards they are those that it
# comes to by itself.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_ALONE = 2**17  # bytes; malloc's own beginning, which it raises to 2**25 otherwise
_LARGEST = 12 * 2**20
_AFTERWARDS = {_TRIM_THRESHOLD: 2**26, _MMAP_THRESHOLD: 2**25}
_NEVER = -1
_FUNCTIONS = ("mallopt", "malloc_trim")
# glibc reads these at its start: who has set one has chosen.
_CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")


@contextmanager
def kept_memory() -> Iterator[Callable[[], None]]:
    """To be entered before the model is made; yields a function to be called once the optimizer has its moments;
    calls behind the first do nothing.

    Until then tensors are mapped one by one, and what is freed is the system's. What stays, weights and moments, lies
    apart then from the heap of the steps behind it: in the gaps of the first step's activations it would leave none
    that those of the second fit into (a 30 M Llama, 1,024 tokens, float32: 1,109 MB above the start for 1,183).
    From the call on freed memory is kept for the next step, for which the system would have to clear it: of it, one
    thread, bfloat16, that took 140,511 page faults a step and 1.37 times the processor time. Blocks above 12 MiB, as
    logits and the gradient of a large embedding are, are still mapped by themselves, since no gap of the heap holds
    them. Afterwards all is returned. Nothing happens where malloc is not glibc's, or where the environment sets its
    thresholds.
    """
    libc = None if _chosen() else _glibc()
    if libc is None:
        yield lambda: None
        return

    kept = False

    def keep() -> None:
        nonlocal kept
        if kept:
            return
        kept = True
        libc.mallopt(_TRIM_THRESHOLD, _NEVER)
        libc.mallopt(_MMAP_THRESHOLD, _LARGEST)
        libc.malloc_trim(0)  # what was read and tokenized before

    libc.mallopt(_MMAP_THRESHOLD, _ALONE)
    try:
        yield keep
    finally:
        for parameter, value in _AFTERWARDS.items():
            libc.mallopt(parameter, value)
        libc.malloc_trim(0)


def _glibc() -> Any:
    """glibc with both functions; None elsewhere. musl too has a name for glibc's version, and no value."""
    if "CS_GNU_LIBC_VERSION" not in getattr(os, "confstr_names", {}) or not os.confstr("CS_GNU_LIBC_VERSION"):
        return None
    libc = ctypes.CDLL(None)
    return libc if all(hasattr(libc, name) for name in _FUNCTIONS) else None


def _chosen() -> bool:
    return any(name in os.environ for name in _CHOSEN) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
