"""Runs the cases of test_triton_gpu.py on the CPU, by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("test_triton_gpu.py")


# two halves, so that pytest-xdist can run them side by side
@pytest.mark.parametrize("half", ["test_float32", "not test_float32"])
def test_cases_of_the_gpu(half: str, interpret_cases: Callable[..., None]) -> None:
    interpret_cases(CASES, "-k", half)
