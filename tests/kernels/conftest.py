"""Running Triton kernels without a GPU: cases in the interpreter, and compilation ahead of time.

Both need a process of their own: Triton decides when it is imported whether its functions are compiled or interpreted.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch

from easytorch.kernels.interop.triton_aot_compile import compile_module
from easytorch.kernels.interop.triton_devices import SHARED_MEMORY

ROOT = Path(__file__).parents[2]
# relative RMS error from float64
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# a thread's registers: 255 on NVIDIA, 512 vector and accumulation registers on CDNA
REGISTERS = {"gfx942": 512}
# fewer is a kernel that was emptied because it cannot run; CDNA has registers of their own for what a wave shares
FEWEST_REGISTERS = {"gfx942": 4}

Results = dict[str, torch.Tensor]


def _numbers(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version(package).split(".")[:2])


@pytest.fixture(scope="session")
def interpret_cases() -> Callable[..., None]:
    """`interpret_cases(file, *options)`: the GPU's cases of a test file, on the CPU by Triton's interpreter."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install easytorch[gpu]")
    if _numbers("triton") < (3, 7) and _numbers("numpy") >= (2, 4):
        pytest.skip("the interpreter of Triton before 3.7 takes int() of an array, which numpy 2.4 refuses")

    def run(cases: Path, *options: str) -> None:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *options, str(cases)]
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        environment.pop("PYTEST_ADDOPTS", None)
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800)
        assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
        assert " passed" in run.stdout

    return run


@pytest.fixture(scope="session")
def compile_ahead() -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """`compile_ahead(module, dtype, *architectures)`: what the module's typical calls take of each GPU.

    One process for the session: starting it costs as much as compiling several kernels.
    """
    pytest.importorskip("triton", reason="Triton is not installed: pip install easytorch[gpu]")
    compiler = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))

    def run(module: str, dtype: str, *architectures: str) -> list[dict[str, Any]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("TRITON_INTERPRET", raising=False)  # the process starts when it is first asked
            rows = list(compiler.map(compile_module, repeat(module), repeat(dtype), architectures))
        assert all(rows)
        kernels = [kernel for row in rows for kernel in row]
        for kernel in kernels:
            architecture = kernel["architecture"]
            fewest, most = FEWEST_REGISTERS.get(architecture, 12), REGISTERS.get(architecture, 255)
            assert fewest <= kernel["registers"] <= most, kernel
            assert kernel["shared"] <= SHARED_MEMORY[architecture], kernel
            assert kernel["tensor_memory"] <= 512, kernel
        return kernels

    with compiler:
        yield run


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel leaves unwritten shows as NaN."""

    def poison(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(make)
        def filled(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return filled

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))


def _results(
    function: Callable[..., torch.Tensor], arguments: dict[str, Any], dtype: torch.dtype, given: torch.dtype
) -> Results:
    """The output and the gradient of every floating tensor, computed from the numbers that `given` has in `dtype`."""
    leaves = {
        name: value.to(given).to(dtype).detach().requires_grad_()
        for name, value in arguments.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    output = function(**{**arguments, **leaves})
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(given)
    grads = torch.autograd.grad(output, list(leaves.values()), upstream.to(output.device, output.dtype))
    return {"output": output.detach(), **{f"gradient of {n}": g for n, g in zip(leaves, grads, strict=True)}}


@pytest.fixture(scope="session")
def assert_matches() -> Callable[..., None]:
    """`assert_matches(function, definition, arguments, dtype)`: outputs and every gradient, by relative RMS error.

    The function is given the floating arguments in `dtype`, the definition the same numbers in float64.
    """

    def check(
        function: Callable[..., torch.Tensor], definition: Callable[..., torch.Tensor], arguments: dict[str, Any],
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        expected = _results(definition, arguments, torch.float64, dtype)
        for name, got in _results(function, arguments, dtype, dtype).items():
            want = expected[name]
            assert got.shape == want.shape
            assert got.isfinite().all(), f"{name} is not finite"
            difference, scale = ((t.double()).square().mean().sqrt() for t in (got - want, want))
            assert want.numel() == 0 or difference <= TOLERANCE[dtype] * scale, (
                f"{name}: relative RMS error {float(difference / scale):.2e}"
            )

    return check
