"""The memory that a step frees is there for the next one, and the system's again after the run."""

from __future__ import annotations

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
