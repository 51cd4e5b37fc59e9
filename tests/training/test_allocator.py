"""The memory that a step frees is there for the next one, and the system's again after the run."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from easytorch.training.allocator import kept_memory

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    "CS_GNU_LIBC_VERSION" not in getattr(os, "confstr_names", {}), reason="malloc is not glibc's"
)


# Prints the page faults of filling 8 MiB four times, within the block and after it.
FAULTS = """
import resource, torch
from easytorch.training.allocator import kept_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.zeros(2**21).fill_(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

with kept_memory() as keep:
    before = faults()
    keep()
    faults()
    kept = faults()
print(before, kept, faults())
"""


def test_memory_is_kept_between_steps_and_given_back_after_them() -> None:
    """In a process of its own: of one that runs many tests, what lies behind its heap may not let that grow."""
    run = subprocess.run(
        [sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True, cwd=ROOT, timeout=600
    )
    before, kept, given_back = map(int, run.stdout.split())
    pages = 4 * 2**23 // resource.getpagesize()
    assert kept < pages / 10, kept
    if "hugetlb" not in os.environ.get("GLIBC_TUNABLES", "") and sys.platform == "linux":
        assert given_back > kept
        assert before > pages / 2, before  # each block is mapped by itself


def test_other_mallocs_and_chosen_thresholds_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """musl has the name of glibc's version and no value for it, and neither of malloc's functions."""
    calls: list[str] = []

    class Library:
        def __getattr__(self, name: str) -> object:
            if musl:
                raise AttributeError(name)
            return lambda *given: calls.append(name)

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    musl = True
    for version in (None, "glibc 2.39"):
        monkeypatch.setattr(os, "confstr", lambda name, version=version: version)
        with kept_memory() as keep:
            keep()
    musl = False
    with kept_memory() as keep:
        assert calls == ["mallopt"]
        keep()
        keep()
        assert calls == ["mallopt"] * 3 + ["malloc_trim"]
    assert calls[-1] == "malloc_trim"
    calls.clear()
    for name, value in (("MALLOC_MMAP_MAX_", "0"), ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=1")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with kept_memory() as keep:
                keep()
    assert not calls
