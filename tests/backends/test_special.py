"""Special values: a seeded sample of what scripts/fuzz_backends.py looks through."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from easytorch import backends
from easytorch.backends import OpType, make_shape


def _special() -> ModuleType:
    if "backend_special" not in sys.modules:
        spec = importlib.util.spec_from_file_location("backend_special", Path(__file__).parent / "special.py")
        assert spec is not None and spec.loader is not None
        sys.modules["backend_special"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["backend_special"]


special = _special()
# Compiling takes a second an operation: those XLA's own expansions of which were found wrong, and some others.
ON_XLA = (OpType.SIN, OpType.COS, OpType.LOG1P, OpType.ABS, OpType.SIGN, OpType.REM, OpType.LOGISTIC, OpType.TAN)


@pytest.mark.parametrize("op_type", special.EXACT, ids=str)
def test_numpy_is_exact(op_type: OpType) -> None:
    pytest.importorskip("mpmath")
    found = list(special.inexact(op_type, 0, 60))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("count", [None, special.LARGE])
@pytest.mark.parametrize("op_type", special.OPS, ids=str)
def test_torch(op_type: OpType, count: int | None, backend_of: Callable[[str], Any]) -> None:
    backend_of("torch")
    found = list(special.differences("torch", op_type, 0, count))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("op_type", ON_XLA, ids=str)
def test_xla(op_type: OpType, backend_of: Callable[[str], Any]) -> None:
    backend_of("xla")
    found = list(special.differences("xla", op_type, 0, None))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", ["numpy", "torch", "xla"])
def test_a_complex_number_is_true_by_its_real_part(name: str, backend_of: Callable[[str], Any]) -> None:
    """As it is converted to every other real type."""
    backend = backend_of(name)
    b = backend.builder("truth")
    program = b.compile(b.convert_dtype(b.parameter("x", make_shape("complex64", 4)), backends.DType.BOOL))
    (found,) = program.execute([backend.buffer_from_numpy(np.array([0, 1, 1j, 2 + 1j], np.complex64))])
    np.testing.assert_array_equal(backend.buffer_to_numpy(found), [False, True, False, True])


@pytest.mark.parametrize(("dtype", "scales"), [("complex64", (1e-25, 1e25)), ("complex128", (1e-200, 1e200))])
@pytest.mark.parametrize("name", ["numpy", "torch", "xla"])
def test_arc_tangents_of_numbers_without_a_square(
    name: str, dtype: str, scales: tuple[float, ...], backend_of: Callable[[str], Any]
) -> None:
    """They are those of the numbers at a size of one."""
    backend, generator = backend_of(name), np.random.default_rng(0)
    b = backend.builder("atan2")
    program = b.compile(b.atan2(*(b.parameter(axis, make_shape(dtype, 300)) for axis in "yx")))
    parts = generator.standard_normal((2, 300)) + 1j * generator.standard_normal((2, 300))
    found = []
    for scale in (1.0, *scales):
        buffers = [backend.buffer_from_numpy((axis * scale).astype(dtype)) for axis in parts]
        found.append(backend.buffer_to_numpy(program.execute(buffers)[0]))
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-5 if dtype == "complex64" else 1e-12)


@pytest.mark.parametrize("name", ["numpy", "torch", "xla"])
def test_sines_of_imaginary_numbers_are_real_or_imaginary(name: str, backend_of: Callable[[str], Any]) -> None:
    """Where the hyperbolic factor overflows too: 0 * inf is not NaN there."""
    backend = backend_of(name)
    b = backend.builder("sines")
    x = b.parameter("x", make_shape("complex128", 4))
    program = b.compile(b.imag(b.cos(x)), b.real(b.sin(x)))
    for found in program.execute([backend.buffer_from_numpy(np.array([800j, -800j, 2j, 0j]))]):
        np.testing.assert_array_equal(backend.buffer_to_numpy(found), 0)
