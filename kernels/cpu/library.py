"""The library of C++ operators, loaded at first use, and built then if it is not there."""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from easytorch.kernels.cpu import build, fakes
from easytorch.kernels.repeated import library as repeated

logger = logging.getLogger(__name__)

# The instruction sets of levels.h by number; a call uses the best that the CPU has, up to the level it names.
LEVELS = tuple(build.LEVELS)
BEST = len(LEVELS) - 1

_lock = threading.Lock()
_asked = False
_reason: str | None = None
_loaded: Path | None = None


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


# In a process forked while a thread held the lock, nothing would release it.
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_renew_lock)


def levels_of(room: str) -> tuple[int, ...]:
    """The levels at which sources of kernels/<room> have code of their own."""
    sources = [source for source in build.sources() if source.parent.name == room and source.stem.endswith("_simd")]
    return tuple(n for n, level in enumerate(LEVELS) if any(build.differs(source, level) for source in sources))


def missing() -> str | None:
    """None when the operators are available, else the reason. The first call loads the library, and builds it if
    needed."""
    return _reason if _asked else _load()


def described() -> str:
    """The state of the library in one line; builds nothing."""
    if _asked:
        return "ATen runs: " + _reason if _reason is not None else f"loaded from {_loaded}"
    reason = build.switched_off() or build.refusal()
    if reason is not None:
        return f"ATen runs: {reason}"
    path = build.library_path()
    if build.built(path):
        return f"built: {path}"
    tool = " ".join(build.compiler() or ())
    return f"not built yet: the first call that gains by them compiles them with {tool} (about a minute, once)"


def _load() -> str | None:
    global _asked, _reason
    with _lock:
        if not _asked:
            _reason = build.switched_off() or _try_to_load()
            _asked = True
            if _reason is not None:
                logger.info("C++ kernels: %s; ATen runs", _reason)
    return _reason


def _try_to_load() -> str | None:
    reason = build.refusal()
    if reason is not None:
        return reason
    path = build.library_path()
    if build.built(path):
        repeated.load()
        return _load_file(path)
    logger.warning(
        "compiling the C++ kernels into %s: about a minute, once (EASYTORCH_CPU_KERNELS=0 turns them off)", path.parent
    )
    try:
        with ThreadPoolExecutor(1) as beside:
            beside.submit(repeated.load)  # compiled meanwhile
            path = build.build()
    except RuntimeError as error:  # `BuildError`, or a thread that cannot start as the process is ending
        logger.warning("no C++ kernels: %s", error)
        return str(error)
    return _load_file(path)


def _load_file(path: Path) -> str | None:
    global _loaded
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return f"{path} does not load ({error}); remove it to have it built again"
    fakes.register()
    _loaded = path
    return None
