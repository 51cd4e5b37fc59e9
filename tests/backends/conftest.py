"""Backends by name, samples of every operation, and how results are compared."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from easytorch import backends
from easytorch.backends.dtypes import DType, dtype_of
from easytorch.backends.registry import _OURS
from easytorch.backends.types import OpType


def _samples() -> ModuleType:
    """The package samples/, by its path: test folders are no packages."""
    if "backend_samples" not in sys.modules:
        folder = Path(__file__).parent / "samples"
        spec = importlib.util.spec_from_file_location(
            "backend_samples", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None
        sys.modules["backend_samples"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["backend_samples"]


@cache
def _new(config: str) -> backends.Backend:
    home = _OURS[config.partition(":")[0]]
    if importlib.util.find_spec(home) is None:
        pytest.skip(f"{home} is not there")
    return backends.new(config)


@pytest.fixture(scope="session")
def backend_of() -> Callable[[str], backends.Backend]:
    """The backend of a configuration, made once; of several devices where it can."""
    return _new


@pytest.fixture(scope="session")
def samples_of() -> Callable[[OpType], list[Any]]:
    """The samples of an operation."""
    table: dict[OpType, list[Any]] = {}
    for sample in _samples().SAMPLES:
        table.setdefault(sample.op_type, []).append(sample)
    return lambda op_type: table.get(op_type, [])


# Relative to an element, or to the largest where sums are made: one rounding of the narrow types, a few of the others.
_ROUNDINGS = {DType.FLOAT16: 1.01, DType.BFLOAT16: 1.01, DType.FLOAT32: 24, DType.FLOAT64: 64}


def _error(found: np.ndarray, wanted: np.ndarray, exact: bool, scaled: bool) -> str | None:
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return f"{found.dtype}{found.shape} instead of {wanted.dtype}{wanted.shape}"
    dtype = dtype_of(wanted.dtype)
    if dtype.is_complex and exact:
        parts = (_error(getattr(found, p), getattr(wanted, p), exact, scaled) for p in ("real", "imag"))
        return next((error for error in parts if error), None)
    if not (dtype.is_float or dtype.is_complex):
        return None if np.array_equal(found, wanted) else f"{found} instead of {wanted}"
    wide = np.complex128 if dtype.is_complex else np.float64
    with np.errstate(invalid="ignore"):
        one, other = found.astype(wide), wanted.astype(wide)
    both_nan = np.isnan(one) & np.isnan(other)
    if exact:
        good = both_nan | ((one == other) & (np.signbit(one) == np.signbit(other)))
    else:
        info = ml_dtypes.finfo(wanted.dtype)
        finite = np.abs(other[np.isfinite(other)])
        size = np.maximum(np.abs(other), finite.max(initial=0)) if scaled else np.abs(other)
        # Numbers below the smallest normal one may be flushed to zero.
        bound = float(info.eps) * _ROUNDINGS.get(dtype.real, 1.01) * size + float(info.smallest_normal)
        with np.errstate(invalid="ignore"):
            good = both_nan | (one == other) | (np.abs(one - other) <= bound)
    if good.all():
        return None
    place = tuple(int(i[0]) for i in np.nonzero(~np.atleast_1d(good)))
    return (
        f"{int((~good).sum())} of {good.size} differ, first at {place}: "
        f"{np.atleast_1d(found)[place]} instead of {np.atleast_1d(wanted)[place]}"
    )


@pytest.fixture(scope="session")
def error_of() -> Callable[..., str | None]:
    """(found, wanted, exact, scaled) -> what is wrong, or None."""
    return _error


def _run(
    backend: backends.Backend, name: str, samples: Sequence[Any], num_devices: int = 1
) -> list[list[np.ndarray] | Exception]:
    """Every sample in one computation: its outputs, or why its operation was refused."""
    builder = backend.builder(name, num_devices)
    inputs: list[Any] = []
    outputs: list[Any] = []
    spans: list[slice | Exception] = []
    for number, sample in enumerate(samples):
        count = len(sample.inputs) // num_devices
        try:
            ops = []
            for place, array in enumerate(sample.inputs[:count]):
                ops.append(builder.parameter(f"{number}.{place}", backends.make_shape(array.dtype, array.shape)))
                inputs.append([sample.inputs[device * count + place] for device in range(num_devices)])
            result = sample.build(builder, *ops)
        except backends.OpNotImplementedError as error:
            spans.append(error)
            continue
        ops = result if isinstance(result, tuple) else (result,)
        spans.append(slice(len(outputs), len(outputs) + len(ops)))
        outputs += ops
    if not outputs:
        return [span for span in spans if isinstance(span, Exception)]
    executable = builder.compile(*outputs)
    given = [backend.buffer_from_numpy(row[device], device) for device in range(num_devices) for row in inputs]
    found = [backend.buffer_to_numpy(buffer) for buffer in executable.execute(given)]
    for array, shape in zip(found, executable.outputs() * num_devices, strict=True):
        assert (dtype_of(array.dtype), array.shape) == (shape.dtype, shape.dimensions), f"{shape} was inferred"
    devices = [found[device * len(outputs) : (device + 1) * len(outputs)] for device in range(num_devices)]
    return [
        span if isinstance(span, Exception) else [array for arrays in devices for array in arrays[span]]
        for span in spans
    ]


@pytest.fixture(scope="session")
def run_samples() -> Callable[..., list[Any]]:
    """(backend, name, samples, num_devices) -> for each the arrays, of one device after the other, or its refusal."""
    return _run
