"""Runs the cases of test_triton_gpu.py on the CPU, by Triton's interpreter."""

from __future__ import annotations

from pathlib import Path


def test_cases_of_the_gpu(interpret_cases):
    interpret_cases(Path(__file__).with_name("test_triton_gpu.py"))
