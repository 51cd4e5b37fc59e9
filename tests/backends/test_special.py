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
ON_XLA += (OpType.EXPM1, OpType.CBRT)
# Of one real number, and what of the grid they take.
ON_GRID = {
    **dict.fromkeys(("exp", "expm1", "sin", "cos", "tan", "tanh", "erf", "logistic", "cbrt"), (-8.0, 8.0)),
    **dict.fromkeys(("log", "sqrt", "rsqrt"), (1e-3, 8.0)),
    "log1p": (-0.99, 2.0),
}


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


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["torch", "xla"])
def test_on_a_grid(name: str, dtype: str, backend_of: Callable[[str], Any]) -> None:
    """Approximations have intervals, and may be left at a wrong end."""
    backend, reference = backend_of(name), backends.new("numpy")
    grids = [np.linspace(*ends, 20_001).astype(dtype) for ends in ON_GRID.values()]

    def computed(by: Any, arrays: list[np.ndarray]) -> list[np.ndarray]:
        b = by.builder("grid")
        ops = [b.parameter(f"x{n}", make_shape(array.dtype, array.shape)) for n, array in enumerate(arrays)]
        program = b.compile(*(getattr(b, method)(op) for method, op in zip(ON_GRID, ops, strict=True)))
        return [by.buffer_to_numpy(x) for x in program.execute([by.buffer_from_numpy(array) for array in arrays])]

    wanted = computed(reference, [grid.astype(np.float64) for grid in grids])
    for method, found, exact, grid in zip(ON_GRID, computed(backend, grids), wanted, grids, strict=True):
        off = np.abs(found - exact) / np.finfo(dtype).eps / np.abs(np.where(exact == 0, 1, exact))
        assert off.max() < 8, f"{method}({grid[off.argmax()]!r}) is off by {off.max():.0f} roundings"


@pytest.mark.parametrize("name", ["numpy", "torch", "xla"])
def test_complex_results_next_to_overflow(name: str, backend_of: Callable[[str], Any]) -> None:
    """Where a factor on the way overflows, or its logarithm has lost digits, and the result is in range."""
    mp = pytest.importorskip("mpmath")
    backend = backend_of(name)
    numbers = {
        "expm1": [709.9 - 2.5j, 745.2 - 3e-170j, 88.8 + 1.5j],
        "cos": [1e10 + 709.9j, 0.1 + 709.9j, 2.5 - 709.9j],
        "sin": [1e10 + 709.9j, 3e-150 + 800j, -2.5 - 709.9j],
        "cbrt": [-1e154 - 1e154j, 1e308 + 1e308j, -1e-300 + 1e-300j],
        "logistic": [-600 + 1j, 600 + 1j, -800 + 1j],
    }
    b = backend.builder("complex")
    ops = [b.parameter(method, make_shape("complex128", 3)) for method in numbers]
    program = b.compile(*(getattr(b, method)(op) for method, op in zip(numbers, ops, strict=True)))
    outputs = program.execute([backend.buffer_from_numpy(np.array(row)) for row in numbers.values()])
    for (method, row), output in zip(numbers.items(), outputs, strict=True):
        for number, found in zip(row, backend.buffer_to_numpy(output), strict=True):
            with mp.workprec(400):
                x = mp.mpmathify(number)
                exact = complex(1 / (1 + mp.exp(-x)) if method == "logistic" else getattr(mp, method)(x))
            np.testing.assert_allclose(
                [found.real, found.imag], [exact.real, exact.imag], 1e-13, 1e-300, err_msg=method
            )


@pytest.mark.parametrize("dtype", ["float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("name", ["numpy", "torch", "xla"])
def test_powers_of_nan(name: str, dtype: str, backend_of: Callable[[str], Any]) -> None:
    """nan**0 and 1**nan are 1, in vectors and in what is left of them."""
    backend = backend_of(name)
    b = backend.builder("powers")
    nan, zero, one = (np.full(37, number, np.float32).astype(backends.DType(dtype).numpy) for number in (np.nan, 0, 1))
    x, y = b.parameter("x", make_shape(dtype, 37)), b.parameter("y", make_shape(dtype, 37))
    program = b.compile(b.pow(x, y))
    for arrays in ((nan, zero), (one, nan)):
        found = backend.buffer_to_numpy(program.execute([backend.buffer_from_numpy(array) for array in arrays])[0])
        np.testing.assert_array_equal(found.astype(np.float32), 1)
