"""Every operation on every backend: NumPy against independent references, the others against NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from easytorch import backends
from easytorch.backends.composites import is_composite
from easytorch.backends.dtypes import DType, dtype_of
from easytorch.backends.types import OP_TYPES, OpType

OTHERS = ("xla", "torch")
# Compiling takes a second each: a few operations of every kind, and the closures.
COMPILED = (
    *(OpType.ADD, OpType.DIV, OpType.ROUND, OpType.REDUCE_WINDOW, OpType.GATHER, OpType.SCATTER_SUM, OpType.SORT),
    *(OpType.CONV_GENERAL_DILATED, OpType.RNG_BIT_GENERATOR, OpType.WHILE_LOOP, OpType.BITCAST),
)
# What is built inside these may be refused too.
_HOLD_OTHERS = (OpType.CALL, OpType.COND, OpType.WHILE_LOOP, OpType.SORT)


@pytest.mark.parametrize("op_type", OP_TYPES, ids=str)
def test_there_are_samples(op_type: OpType, samples_of: Callable[..., Any]) -> None:
    samples = samples_of(op_type)
    assert samples, f"{op_type} has no sample"
    assert len({str(sample) for sample in samples}) == len(samples)


def _apart(samples: Sequence[Any]) -> list[tuple[int, list[Any]]]:
    """By the number of devices, in order."""
    by_devices = sorted(samples, key=lambda sample: sample.num_devices)
    return [(count, list(group)) for count, group in itertools.groupby(by_devices, lambda sample: sample.num_devices)]


def _results(
    backend: backends.Backend, op_type: OpType, samples: Sequence[Any], run_samples: Callable[..., Any]
) -> dict[str, Any]:
    found = {}
    for count, group in _apart(samples):
        if count <= backend.num_devices():
            results = run_samples(backend, str(op_type), group, count)
            found.update(zip(map(str, group), results, strict=True))
    return found


@pytest.fixture(scope="session")
def defined(
    backend_of: Callable[..., Any], samples_of: Callable[..., Any], run_samples: Callable[..., Any]
) -> Callable[[OpType], dict[str, Any]]:
    """The results of NumPy, by the samples' names."""
    return cache(lambda op_type: _results(backend_of("numpy"), op_type, samples_of(op_type), run_samples))


def _wide(array: np.ndarray) -> np.ndarray:
    dtype = dtype_of(array.dtype)
    if dtype.is_float:
        return array.astype(np.float64)
    if dtype.is_complex:
        return array.astype(np.complex128)
    return array.astype({DType.INT4: np.int8, DType.UINT4: np.uint8}.get(dtype, array.dtype))


def _narrow(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A result of the wide types in the narrow one: rounded, or modulo its bits."""
    kind = dtype_of(dtype)
    if kind.bits == 4:
        low = array.astype(np.int64) & 15
        array = np.where((low > 7) & (kind is DType.INT4), low - 16, low)
    with np.errstate(all="ignore"):
        return np.asarray(array).astype(dtype)


def _by_jax(samples: Sequence[Any]) -> list[tuple[np.ndarray, ...]]:
    jax = pytest.importorskip("jax")
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        # Not jitted: most samples are of shapes and wide types for which jax has compiled the operations before.
        results = [sample.jax(*(jax.numpy.asarray(_wide(array)) for array in sample.inputs)) for sample in samples]
        return [tuple(map(np.asarray, result if isinstance(result, tuple) else (result,))) for result in results]


@pytest.mark.parametrize("op_type", OP_TYPES, ids=str)
def test_numpy_is_right(
    op_type: OpType, samples_of: Callable[..., Any], defined: Callable[..., Any], error_of: Callable[..., Any]
) -> None:
    samples, found = samples_of(op_type), defined(op_type)
    in_jax = [sample for sample in samples if sample.jax]
    references = [(sample, result, "jax") for sample, result in zip(in_jax, _by_jax(in_jax), strict=True)]
    for sample in samples:
        if sample.host:
            result = sample.host(*sample.inputs)
            references.append((sample, result if isinstance(result, tuple) else (result,), "host"))
    errors = []
    for sample, wanted, where in references:
        outputs = found[str(sample)]
        if isinstance(outputs, Exception):
            errors.append(f"{sample}: {outputs}")
            continue
        assert len(outputs) == len(wanted), f"{sample}: {len(outputs)} outputs instead of {len(wanted)}"
        for output, reference in zip(outputs, wanted, strict=True):
            error = error_of(output, _narrow(np.asarray(reference), output.dtype), sample.exact, sample.scaled)
            if error:
                errors.append(f"{sample} ({where}): {error}")
    assert not errors, "\n".join(errors)


def _check(
    backend: backends.Backend, op_type: OpType, samples: Sequence[Any], found: Any, wanted: Any, error_of: Any
) -> None:
    capabilities = backend.capabilities()
    errors = []
    for sample in samples:
        outputs = found.get(str(sample))
        if outputs is None:
            continue
        if isinstance(outputs, Exception):
            dtypes = {dtype_of(array.dtype) for array in (*sample.inputs, *wanted[str(sample)])}
            first = dtype_of((sample.inputs or wanted[str(sample)])[0].dtype)
            refused = not capabilities.supports(op_type, first) or not dtypes <= capabilities.dtypes
            if not refused and op_type not in _HOLD_OTHERS and not is_composite(op_type):
                errors.append(f"{sample}: refused, and the capabilities have it: {outputs}")
            continue
        for output, reference in zip(outputs, wanted[str(sample)], strict=True):
            error = error_of(output, reference, sample.exact, sample.scaled)
            if error:
                errors.append(f"{sample}: {error}")
    assert not errors, "\n".join(errors)


@pytest.mark.parametrize("config", OTHERS)
@pytest.mark.parametrize("op_type", OP_TYPES, ids=str)
def test_a_backend_does_what_numpy_does(
    config: str,
    op_type: OpType,
    backend_of: Callable[..., Any],
    samples_of: Callable[..., Any],
    run_samples: Callable[..., Any],
    defined: Callable[..., Any],
    error_of: Callable[..., Any],
) -> None:
    backend, samples = backend_of(config), samples_of(op_type)
    found = _results(backend, op_type, samples, run_samples)
    _check(backend, op_type, samples, found, defined(op_type), error_of)


@pytest.mark.parametrize("op_type", COMPILED, ids=str)
def test_torch_compiled(
    op_type: OpType,
    backend_of: Callable[..., Any],
    samples_of: Callable[..., Any],
    run_samples: Callable[..., Any],
    defined: Callable[..., Any],
    error_of: Callable[..., Any],
) -> None:
    backend = backend_of("torch:compile")
    samples = [sample for sample in samples_of(op_type) if "float32" in str(sample) or "int8" in str(sample)][:3]
    found = _results(backend, op_type, samples, run_samples)
    _check(backend, op_type, samples, found, defined(op_type), error_of)
