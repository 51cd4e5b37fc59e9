"""The memory that a step frees is there for the next one, and the system's again after the run."""

from __future__ import annotations

import ctypes
import os
import resource
import sys

import pytest
import torch

from easytorch.training.allocator import kept_memory

pytestmark = pytest.mark.skipif(
    "CS_GNU_LIBC_VERSION" not in getattr(os, "confstr_names", {}), reason="malloc is not glibc's"
)


def faults(steps: int) -> int:
    """The page faults of filling 64 MiB that often."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(steps):
        torch.zeros(2**24).fill_(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_memory_is_kept_between_steps_and_given_back_after_them() -> None:
    with kept_memory():
        faults(4)
        kept = faults(4)
    given_back = faults(4)
    pages = 4 * 2**26 // resource.getpagesize()
    assert kept < pages / 10, kept
    if "hugetlb" not in os.environ.get("GLIBC_TUNABLES", "") and sys.platform == "linux":
        assert given_back > kept


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
        with kept_memory():
            pass
    musl = False
    with kept_memory():
        assert calls == ["mallopt", "mallopt"]
    assert calls[-1] == "malloc_trim"
    calls.clear()
    for name, value in (("MALLOC_MMAP_MAX_", "0"), ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=1")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with kept_memory():
                pass
    assert not calls
