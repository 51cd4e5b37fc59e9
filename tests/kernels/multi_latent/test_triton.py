"""The Triton kernel on latents without a GPU: in the interpreter, and compiled ahead of time for DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")


def test_cases_of_the_gpu(interpret_cases: Callable[..., None]) -> None:
    interpret_cases(Path(__file__).with_name("test_triton_gpu.py"))


def test_compiles_ahead_of_time(compile_ahead: Callable[..., list[dict[str, Any]]]) -> None:
    kernels = compile_ahead("easytorch.kernels.multi_latent.triton_calls", "bfloat16", *ARCHITECTURES)
    assert len(kernels) == len(ARCHITECTURES) * 3
    # the tensor cores from Hopper on want 64 rows, whose sums fill the registers
    assert [k for k in kernels if k["stack"] > (264 if k["architecture"] in ("sm_90", "sm_100") else 0)] == []
