"""What is refused, on every backend: an exception that names the operation and what was given, never an abort."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from easytorch import backends
from easytorch.backends import BackendError, make_shape
from easytorch.backends.types import ConvolveAxesConfig, FFTType, OpType, PadAxis, ReduceOpType

NAMES = ("numpy", "torch", "xla")
F32 = make_shape("float32", 2, 3)


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest, backend_of: Callable[[str], Any]) -> backends.Backend:
    return backend_of(request.param)


@pytest.fixture(params=NAMES)
def config(request: pytest.FixtureRequest, backend_of: Callable[[str], Any]) -> str:
    """Of a backend that is there, for tests that finalize their own."""
    backend_of(request.param)
    return request.param


def doubling(backend: backends.Backend) -> backends.Executable:
    b = backend.builder("doubling")
    x = b.parameter("x", F32)
    return b.compile(b.add(x, x))


def ones(backend: backends.Backend, *dims: int, dtype: str = "float32") -> Any:
    return backend.buffer_from_numpy(np.ones(dims, dtype))


def test_an_unknown_backend_lists_the_known() -> None:
    with pytest.raises(BackendError, match=r"'nothing'.*numpy.*torch.*xla"):
        backends.new("nothing:1")
    with pytest.raises(BackendError):
        backends.new("")


def test_the_environment_names_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(backends.CONFIG_ENV_VAR, "numpy:3")
    assert backends.new().num_devices() == 3
    monkeypatch.setenv(backends.CONFIG_ENV_VAR, "")
    with pytest.raises(BackendError):
        backends.new()
    monkeypatch.delenv(backends.CONFIG_ENV_VAR)
    monkeypatch.setattr(backends, "DEFAULT_CONFIG", "numpy")
    assert backends.new().name == "numpy"


@pytest.mark.parametrize("rest", ["0", "-1", "two"])
def test_numpy_takes_a_number_of_devices(rest: str) -> None:
    with pytest.raises(BackendError, match="number of devices"):
        backends.new(f"numpy:{rest}")


def test_nothing_is_added_after_compile(backend: backends.Backend) -> None:
    b = backend.builder("closed")
    x = b.parameter("x", F32)
    b.compile(x)
    for again in (lambda: b.add(x, x), lambda: b.parameter("y", F32), lambda: b.constant(1.0), lambda: b.compile(x)):
        with pytest.raises(BackendError, match="'closed' is compiled already"):
            again()


def test_another_builders_operation(backend: backends.Backend) -> None:
    one, other = backend.builder("one"), backend.builder("other")
    x, y = one.parameter("x", F32), other.parameter("y", F32)
    with pytest.raises(BackendError, match=r"Add.*'one'"):
        one.add(x, y)
    with pytest.raises(BackendError, match="'other'"):
        other.compile(x)
    with pytest.raises(BackendError, match=r"OpShape|op_shape"):
        other.op_shape(x)
    with pytest.raises(BackendError, match=r"Neg.*no operation"):
        one.neg(1.0)


def test_a_closures_operation_stays_in_it(backend: backends.Backend) -> None:
    b = backend.builder("outer")
    x = b.parameter("x", F32)
    kept = []

    def function(c: backends.Builder, y: backends.Op) -> backends.Op:
        kept.append((c, c.neg(y)))
        return kept[0][1]

    b.call(function, x)
    inner, op = kept[0]
    with pytest.raises(BackendError):
        b.neg(op)
    with pytest.raises(BackendError):
        inner.neg(op)
    with pytest.raises(BackendError, match="closure"):
        b.call(lambda c, y: c.compile(y), x)


def test_parameters_and_outputs(backend: backends.Backend) -> None:
    b = backend.builder("twice")
    b.parameter("x", F32)
    with pytest.raises(BackendError, match="'x'"):
        b.parameter("x", F32)
    with pytest.raises(BackendError, match="no outputs"):
        b.compile()
    with pytest.raises(BackendError, match=r"Constant.*5.*\(2, 3\)"):
        b.constant(np.zeros(5), 2, 3)
    with pytest.raises(BackendError, match="negative"):
        make_shape("float32", -1)
    with pytest.raises(BackendError, match="float7"):
        make_shape("float7", 1)


def test_inputs_are_counted_and_compared(backend: backends.Backend) -> None:
    executable = doubling(backend)
    with pytest.raises(BackendError, match="1 inputs, and 0"):
        executable.execute([])
    with pytest.raises(BackendError, match="1 inputs, and 2"):
        executable.execute([ones(backend, 2, 3)] * 2)
    # Of the same size in bytes.
    with pytest.raises(BackendError, match=r"'x'.*float32\[2, 3\].*float32\[3, 2\]"):
        executable.execute([ones(backend, 3, 2)])
    with pytest.raises(BackendError, match=r"int32\[2, 3\]"):
        executable.execute([ones(backend, 2, 3, dtype="int32")])
    with pytest.raises(BackendError, match="donate"):
        executable.execute([ones(backend, 2, 3)], donate=[True, False])


def test_a_donated_buffer_is_gone(backend: backends.Backend) -> None:
    executable = doubling(backend)
    given = ones(backend, 2, 3)
    (found,) = executable.execute([given], donate=[True])
    np.testing.assert_array_equal(backend.buffer_to_numpy(found), np.full((2, 3), 2, np.float32))
    for use in (backend.buffer_to_numpy, backend.buffer_shape, lambda b: executable.execute([b])):
        with pytest.raises(BackendError):
            use(given)


def test_a_donated_buffer_is_given_once(backend: backends.Backend) -> None:
    b = backend.builder("two")
    executable = b.compile(b.add(b.parameter("x", F32), b.parameter("y", F32)))
    buffer = ones(backend, 2, 3)
    for donate in ([True, True], [True, False], [False, True]):
        with pytest.raises(BackendError, match="a second time"):
            executable.execute([buffer, buffer], donate)
    (found,) = executable.execute([buffer, buffer])
    assert (backend.buffer_to_numpy(found) == 2).all()


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_inputs_are_on_the_devices_they_are_for(name: str, backend_of: Callable[[str], Any]) -> None:
    backend = backend_of(name)
    elsewhere = backend.buffer_from_numpy(np.ones((2, 3), "float32"), 1)
    with pytest.raises(BackendError, match="input 0 is for device 0, and is on device 1"):
        doubling(backend).execute([elsewhere])


def test_what_is_not_donated_stays(backend: backends.Backend) -> None:
    executable = doubling(backend)
    given = ones(backend, 2, 3)
    for _ in range(2):
        (found,) = executable.execute([given])
        np.testing.assert_array_equal(backend.buffer_to_numpy(found), np.full((2, 3), 2, np.float32))
    np.testing.assert_array_equal(backend.buffer_to_numpy(given), np.ones((2, 3), np.float32))


def test_a_finalized_buffer_is_gone(backend: backends.Backend) -> None:
    executable = doubling(backend)
    given = ones(backend, 2, 3)
    backend.buffer_finalize(given)
    uses: list[Callable[[Any], Any]] = [
        backend.buffer_shape,
        backend.buffer_device_num,
        backend.buffer_to_numpy,
        backend.buffer_to_torch,
        backend.buffer_finalize,
        lambda b: backend.buffer_to_flat_data(b, np.empty(6, np.float32)),
        lambda b: executable.execute([b]),
    ]
    for use in uses:
        with pytest.raises(BackendError):
            use(given)


def test_a_finalized_executable(backend: backends.Backend) -> None:
    executable = doubling(backend)
    executable.finalize()
    with pytest.raises(BackendError, match="'doubling' is finalized"):
        executable.execute([ones(backend, 2, 3)])


def test_a_finalized_backend(config: str) -> None:
    backend = backends.new(config)
    executable, given, b = doubling(backend), ones(backend, 2, 3), backend.builder("late")
    x = b.parameter("x", F32)
    assert not backend.is_finalized()
    backend.finalize()
    assert backend.is_finalized()
    uses: list[Callable[[], Any]] = [
        lambda: executable.execute([given]),
        lambda: backend.builder("more"),
        lambda: backend.num_devices(),
        lambda: b.neg(x),
        lambda: b.compile(x),
        lambda: backend.buffer_from_numpy(np.ones(2)),
        lambda: backend.buffer_to_numpy(given),
        lambda: backend.buffer_shape(given),
    ]
    for number, use in enumerate(uses):
        with pytest.raises(BackendError):
            use()
            pytest.fail(f"use {number} of a finalized backend was no error")


def test_flat_data_is_compared(backend: backends.Backend) -> None:
    with pytest.raises(BackendError):
        backend.buffer_from_flat_data(0, np.zeros(5, np.float32), F32)
    with pytest.raises(BackendError):
        backend.buffer_from_flat_data(0, np.zeros(6, np.int32), F32)
    with pytest.raises(BackendError):
        backend.buffer_from_flat_data(99, np.zeros(6, np.float32), F32)
    buffer = backend.buffer_from_flat_data(0, np.arange(6, dtype=np.float32), F32)
    with pytest.raises(BackendError):
        backend.buffer_to_flat_data(buffer, np.empty(5, np.float32))
    with pytest.raises(BackendError):
        backend.buffer_to_flat_data(buffer, np.empty(6, np.int32))
    flat = np.empty(6, np.float32)
    backend.buffer_to_flat_data(buffer, flat)
    np.testing.assert_array_equal(flat, np.arange(6))


def test_shared_buffers(backend: backends.Backend) -> None:
    if not backend.has_shared_buffers():
        with pytest.raises(BackendError):
            backend.new_shared_buffer(0, F32)
        return
    buffer, flat = backend.new_shared_buffer(0, F32)
    flat[:] = np.arange(6)
    (found,) = doubling(backend).execute([buffer])
    np.testing.assert_array_equal(backend.buffer_to_numpy(found).ravel(), 2 * np.arange(6))
    backend.buffer_data(buffer)[0] = 7
    assert backend.buffer_to_numpy(buffer)[0, 0] == 7 and flat[0] == 7


def test_outputs_are_memory_of_their_own(backend: backends.Backend) -> None:
    """An input given back is a copy: whoever writes one does not write the other."""
    b = backend.builder("identity")
    x = b.parameter("x", F32)
    executable = b.compile(x, x, b.identity(x), b.reshape(x, 6))
    given = np.arange(6, dtype=np.float32).reshape(2, 3)
    found = executable.execute([backend.buffer_from_numpy(given)])
    results = [backend.buffer_to_numpy(buffer).copy() for buffer in found]
    for buffer in found[1:]:
        backend.buffer_finalize(buffer)
    given[:] = -1
    np.testing.assert_array_equal(backend.buffer_to_numpy(found[0]), results[0])
    np.testing.assert_array_equal(results[3], np.arange(6))


def test_more_devices_than_there_are(backend: backends.Backend) -> None:
    with pytest.raises(BackendError, match="devices"):
        backend.builder("many", backend.num_devices() + 1)


X = make_shape("float32", 2, 3)
V = make_shape("float32", 3)
INTS = make_shape("int32", 2, 3)
S = make_shape("float32")
B = make_shape("bool", 2, 3)
U = make_shape("uint64", 3)
C = make_shape("complex64", 4)
_AXES = ConvolveAxesConfig(0, 1, (2,), 1, 0, (2,), 0, 1, (2,))
_BAD_AXES = ConvolveAxesConfig(0, 1, (1,), 1, 0, (2,), 0, 1, (2,))
D = make_shape("float32", 1, 2, 5)
K = make_shape("float32", 3, 2, 2)
E = make_shape("float32", 1, 2, 3, 0)
_ONE_TRUE = np.array(True)
# (operation, shapes of its operands, how it is added)
WRONG: list[tuple[OpType, tuple[backends.Shape, ...], Callable[..., Any]]] = [
    (OpType.ADD, (X, INTS), lambda b, x, y: b.add(x, y)),
    (OpType.ADD, (X, V), lambda b, x, y: b.add(x, y)),
    (OpType.ADD, (X, make_shape("float32", 2, 2)), lambda b, x, y: b.add(x, y)),
    (OpType.SIN, (INTS,), lambda b, x: b.sin(x)),
    (OpType.SUB, (B, B), lambda b, x, y: b.sub(x, y)),
    (OpType.LOGICAL_AND, (INTS, INTS), lambda b, x, y: b.logical_and(x, y)),
    (OpType.BITWISE_NOT, (X,), lambda b, x: b.bitwise_not(x)),
    (OpType.REM, (C, C), lambda b, x, y: b.rem(x, y)),
    (OpType.REDUCE_PRECISION, (X,), lambda b, x: b.reduce_precision(x, 0, 3)),
    (OpType.REDUCE_PRECISION, (INTS,), lambda b, x: b.reduce_precision(x, 5, 3)),
    (OpType.TRIANGULAR_SOLVE, (X, X), lambda b, x, y: b.triangular_solve(x, y, True, True)),
    (OpType.SCATTER_MULTIPLY, (B, INTS, B), lambda b, x, i, u: b.scatter_multiply(x, i, u, 2, (), (0,), (0,))),
    (OpType.SELECT_AND_SCATTER, (X, X, S), lambda b, x, y, i: b.select_and_scatter(x, y, i, _ge, _add, (2, 3))),
    (OpType.SELECT_AND_SCATTER, (X, X, S), lambda b, x, y, i: b.select_and_scatter(x, y, i, _add, _add, (1, 1))),
    (
        OpType.SELECT_AND_SCATTER,
        (X, X, S),
        lambda b, x, y, i: b.select_and_scatter(x, y, i, lambda c, p, q: c.less_than(i, q), _add, (1, 1)),
    ),
    (OpType.SCALED_DOT_PRODUCT_ATTENTION, (E, E, E), lambda b, *x: b.scaled_dot_product_attention(*x)),
    (OpType.COMPLEX, (INTS, INTS), lambda b, x, y: b.complex(x, y)),
    (OpType.CONJ, (X,), lambda b, x: b.conj(x)),
    (OpType.CLAMP, (V, X, V), lambda b, x, y, z: b.clamp(x, y, z)),
    (OpType.WHERE, (X, X, X), lambda b, x, y, z: b.where(x, y, z)),
    (OpType.WHERE, (B, X, INTS), lambda b, x, y, z: b.where(x, y, z)),
    (OpType.BITCAST, (X,), lambda b, x: b.bitcast(x, "float64")),
    (OpType.BITCAST, (B,), lambda b, x: b.bitcast(x, "uint8")),
    (OpType.BITCAST, (make_shape("bool"),), lambda b, x: b.bitcast(x, "uint8")),
    (OpType.EQUAL_TOTAL_ORDER, (INTS, INTS), lambda b, x, y: b.equal_total_order(x, y)),
    (OpType.IOTA, (), lambda b: b.iota(X, 2)),
    (OpType.IOTA, (), lambda b: b.iota(B, 0)),
    (OpType.RESHAPE, (X,), lambda b, x: b.reshape(x, 4)),
    (OpType.RESHAPE, (X,), lambda b, x: b.reshape(x, -1, 6)),
    (OpType.TRANSPOSE, (X,), lambda b, x: b.transpose(x, 0, 0)),
    (OpType.TRANSPOSE, (X,), lambda b, x: b.transpose(x, 0)),
    (OpType.BROADCAST, (X,), lambda b, x: b.broadcast(x, -2)),
    (OpType.BROADCAST_IN_DIM, (V,), lambda b, x: b.broadcast_in_dim(x, X, (0,))),
    (OpType.BROADCAST_IN_DIM, (X,), lambda b, x: b.broadcast_in_dim(x, X, (1, 0))),
    (OpType.BROADCAST_IN_DIM, (V,), lambda b, x: b.broadcast_in_dim(x, INTS, (1,))),
    (OpType.CONCATENATE, (X, V), lambda b, x, y: b.concatenate(0, x, y)),
    (OpType.CONCATENATE, (X, X), lambda b, x, y: b.concatenate(2, x, y)),
    (OpType.CONCATENATE, (), lambda b: b.concatenate(0)),
    (OpType.SLICE, (X,), lambda b, x: b.slice(x, (0, 0), (2, 4))),
    (OpType.SLICE, (X,), lambda b, x: b.slice(x, (0, 2), (2, 1))),
    (OpType.SLICE, (X,), lambda b, x: b.slice(x, (0, 0), (2, 3), (1, 0))),
    (OpType.DYNAMIC_SLICE, (V, S), lambda b, x, i: b.dynamic_slice(x, (i,), (2,))),
    (OpType.DYNAMIC_SLICE, (V, make_shape("int32")), lambda b, x, i: b.dynamic_slice(x, (i,), (4,))),
    (OpType.DYNAMIC_UPDATE_SLICE, (X, X, make_shape("int32")), lambda b, x, u, i: b.dynamic_update_slice(x, u, (i,))),
    (OpType.PAD, (X, S), lambda b, x, f: b.pad(x, f, PadAxis(0, 0, -1))),
    (OpType.PAD, (X, S), lambda b, x, f: b.pad(x, f, PadAxis(-2, -1))),
    (OpType.PAD, (X, V), lambda b, x, f: b.pad(x, f)),
    (OpType.REVERSE, (X,), lambda b, x: b.reverse(x, 1, 1)),
    (OpType.REVERSE, (X,), lambda b, x: b.reverse(x, -1)),
    (OpType.ARG_MIN_MAX, (X,), lambda b, x: b.arg_min_max(x, 2, "int32", True)),
    (OpType.ARG_MIN_MAX, (X,), lambda b, x: b.arg_min_max(x, 0, "float32", True)),
    (OpType.ARG_MIN_MAX, (make_shape("float32", 0),), lambda b, x: b.arg_min_max(x, 0, "int32", True)),
    (OpType.REDUCE_SUM, (X,), lambda b, x: b.reduce_sum(x, 0, 0)),
    (OpType.REDUCE_SUM, (X,), lambda b, x: b.reduce_sum(x, 2)),
    (OpType.REDUCE_SUM, (B,), lambda b, x: b.reduce_sum(x)),
    (OpType.REDUCE_MAX, (C,), lambda b, x: b.reduce_max(x)),
    (OpType.REDUCE_BITWISE_AND, (X,), lambda b, x: b.reduce_bitwise_and(x)),
    (OpType.REDUCE_LOGICAL_AND, (INTS,), lambda b, x: b.reduce_logical_and(x)),
    (OpType.REDUCE_WINDOW, (X,), lambda b, x: b.reduce_window(x, ReduceOpType.SUM, (2,))),
    (OpType.REDUCE_WINDOW, (X,), lambda b, x: b.reduce_window(x, ReduceOpType.UNDEFINED, (1, 1))),
    (OpType.REDUCE_WINDOW, (X,), lambda b, x: b.reduce_window(x, ReduceOpType.SUM, (1, 0))),
    (OpType.REDUCE_WINDOW, (V,), lambda b, x: b.reduce_window(x, ReduceOpType.SUM, (1,), paddings=[(-2, -2)])),
    (OpType.REDUCE_WINDOW, (V,), lambda b, x: b.reduce_window(x, ReduceOpType.SUM, (1,), paddings=[(2**48, -(2**48))])),
    (OpType.REDUCE_WINDOW, (V,), lambda b, x: b.reduce_window(x, ReduceOpType.SUM, (1,), (2**48,))),
    (OpType.REDUCE_WINDOW, (V,), lambda b, x: b.reduce_window(x, ReduceOpType.SUM, (2**30,), (1,), None, (2**30,))),
    (OpType.SELECT_AND_SCATTER_MAX, (X, X), lambda b, x, y: b.select_and_scatter_max(x, y, (2, 3))),
    (OpType.DOT, (X, X), lambda b, x, y: b.dot(x, y)),
    (OpType.DOT, (S, V), lambda b, x, y: b.dot(x, y)),
    (OpType.DOT_GENERAL, (X, X), lambda b, x, y: b.dot_general(x, (1,), (), y, (0,), ())),
    (OpType.DOT_GENERAL, (X, X), lambda b, x, y: b.dot_general(x, (1,), (1,), y, (1,), (1,))),
    (OpType.DOT_GENERAL, (X, X), lambda b, x, y: b.dot_general(x, (1,), (0,), y, (1,), ())),
    (OpType.CONV_GENERAL_DILATED, (D, K), lambda b, x, y: b.conv_general_dilated(x, y, _BAD_AXES)),
    (OpType.CONV_GENERAL_DILATED, (D, D), lambda b, x, y: b.conv_general_dilated(x, y, _AXES, filter_group_count=2)),
    (OpType.CONV_GENERAL_DILATED, (D, K), lambda b, x, y: b.conv_general_dilated(x, y, _AXES, strides=(0,))),
    (OpType.CONV_GENERAL_DILATED, (D, K), lambda b, x, y: b.conv_general_dilated(x, y, _AXES, batch_group_count=2)),
    (OpType.FFT, (V,), lambda b, x: b.fft(x, FFTType.FORWARD, (3,))),
    (OpType.FFT, (C,), lambda b, x: b.fft(x, FFTType.FORWARD, (3,))),
    (OpType.FFT, (C,), lambda b, x: b.fft(x, FFTType.FORWARD_REAL, (4,))),
    (OpType.FFT, (C,), lambda b, x: b.fft(x, FFTType.FORWARD, ())),
    (OpType.GATHER, (X, X), lambda b, x, i: b.gather(x, i, 2, (), (0,), (0,), (1, 1))),
    (OpType.GATHER, (X, INTS), lambda b, x, i: b.gather(x, i, 2, (2,), (0,), (0,), (1, 4))),
    (OpType.GATHER, (X, INTS), lambda b, x, i: b.gather(x, i, 2, (0, 0), (), (0,), (1, 1))),
    (OpType.SCATTER_SUM, (X, INTS, V), lambda b, x, i, u: b.scatter_sum(x, i, u, 2, (), (0, 1), (0,))),
    (OpType.SCATTER_MAX, (C, INTS, C), lambda b, x, i, u: b.scatter_max(x, i, u, 2, (), (0,), (0,))),
    (OpType.RNG_BIT_GENERATOR, (V,), lambda b, s: b.rng_bit_generator(s, X)),
    (OpType.RNG_BIT_GENERATOR, (U,), lambda b, s: b.rng_bit_generator(s, B)),
    (
        OpType.BATCH_NORM_FOR_TRAINING,
        (X, V, make_shape("float32", 2)),
        lambda b, *x: b.batch_norm_for_training(*x, 0.1, 1),
    ),
    (OpType.BATCH_NORM_FOR_INFERENCE, (INTS, V, V, V, V), lambda b, *x: b.batch_norm_for_inference(*x, 0.1, 1)),
    (OpType.BATCH_NORM_GRADIENT, (X, V, V, V, V), lambda b, *x: b.batch_norm_gradient(*x, 0.1, 1)),
    (OpType.CALL, (), lambda b: b._add(OpType.CALL, b.parameter("p", X), function=_taking_nothing(b))),
    (OpType.WHILE_LOOP, (X,), lambda b, x: b.while_loop(lambda c, y: y, lambda c, y: y, x)),
    (
        OpType.WHILE_LOOP,
        (X,),
        lambda b, x: b.while_loop(lambda c, y: c.constant(_ONE_TRUE), lambda c, y: c.reduce_sum(y), x),
    ),
    (OpType.WHILE_LOOP, (), lambda b: b.while_loop(lambda c: c.constant(_ONE_TRUE), lambda c: c.constant(1.0))),
    (OpType.COND, (B,), lambda b, p: b.cond(p, lambda c: c.constant(1.0), lambda c: c.constant(1.0))),
    (
        OpType.COND,
        (make_shape("bool"),),
        lambda b, p: b.cond(p, lambda c: c.constant(np.float32(1)), lambda c: c.constant(np.int32(1))),
    ),
    (OpType.SORT, (X, V), lambda b, x, y: b.sort(lambda c, p, q, r, s: c.less_than(p, q), 0, True, x, y)),
    (OpType.SORT, (X,), lambda b, x: b.sort(lambda c, p, q: c.less_than(p, q), 2, True, x)),
    (OpType.SORT, (X,), lambda b, x: b.sort(lambda c, p, q: p, 1, True, x)),
    (OpType.ALL_REDUCE, (X,), lambda b, x: b.all_reduce(x, ReduceOpType.SUM, [[0, 1]])),
    (OpType.ALL_REDUCE, (B,), lambda b, x: b.all_reduce(x, ReduceOpType.SUM)),
    (OpType.ALL_GATHER, (X,), lambda b, x: b.all_gather(x, 2)),
    (OpType.COLLECTIVE_PERMUTE, (X,), lambda b, x: b.collective_permute(x, [[0, 1]])),
    (OpType.SOFTMAX, (INTS,), lambda b, x: b.softmax(x, 0)),
    (OpType.SOFTMAX, (X,), lambda b, x: b.softmax(x, 2)),
    (OpType.LAYER_NORM, (X, V, V), lambda b, *x: b.layer_norm(*x, (0,), 1e-5)),
    (OpType.GELU, (INTS,), lambda b, x: b.gelu(x)),
    (OpType.SCALED_DOT_PRODUCT_ATTENTION, (X, X, X), lambda b, *x: b.scaled_dot_product_attention(*x)),
]


def _ge(b: backends.Builder, x: backends.Op, y: backends.Op) -> backends.Op:
    return b.greater_or_equal(x, y)


def _add(b: backends.Builder, x: backends.Op, y: backends.Op) -> backends.Op:
    return b.add(x, y)


def _taking_nothing(b: backends.Builder) -> Any:
    return b._closure(lambda c: c.constant(1.0), (), "nothing")


@pytest.mark.parametrize(
    ("op_type", "shapes", "add"), WRONG, ids=[f"{number} {op}" for number, (op, _, _) in enumerate(WRONG)]
)
def test_what_does_not_fit(op_type: OpType, shapes: tuple[backends.Shape, ...], add: Callable[..., Any]) -> None:
    """Shapes are inferred by one code for all backends, before they see anything."""
    b = backends.new("numpy").builder("wrong")
    ops = [b.parameter(f"p{number}", shape) for number, shape in enumerate(shapes)]
    with pytest.raises(BackendError) as caught:
        add(b, *ops)
    message = str(caught.value)
    assert op_type.go_name in message, message
    assert all(str(shape) in message for shape in shapes), message
    b.compile(b.constant(1.0))


def test_divergent_devices_have_no_collective() -> None:
    backend = backends.new("numpy:2")
    b = backend.builder("apart", 2)
    pred, x = b.parameter("pred", make_shape("bool")), b.parameter("x", make_shape("float32"))
    (found,) = b.cond(pred, lambda c: c.all_reduce(x, ReduceOpType.SUM), lambda c: c.neg(x))
    executable = b.compile(found)

    def run(*preds: bool) -> list[float]:
        values = (np.float32(1), np.float32(2))
        given = [
            backend.buffer_from_numpy(np.asarray(value), device)
            for device, pair in enumerate(zip(map(np.bool_, preds), values, strict=True))
            for value in pair
        ]
        return [float(backend.buffer_to_numpy(buffer)) for buffer in executable.execute(given)]

    assert run(True, True) == [3, 3]
    assert run(False, False) == [-1, -2]
    with pytest.raises(BackendError, match=r"AllReduce.*\[0, 1\].*\[0\]"):
        run(True, False)


def test_an_element_type_that_is_not_there() -> None:
    class Few(type(backends.new("notimplemented"))):  # type: ignore[misc]
        def capabilities(self) -> backends.Capabilities:
            f32 = backends.DType.FLOAT32
            known = {op: frozenset({f32}) for op in (OpType.PARAMETER, OpType.CONSTANT, OpType.ADD)}
            return backends.Capabilities(known, frozenset({f32}))

    b = Few().builder("few")
    x = b.parameter("x", F32)
    assert b.op_shape(b.add(x, x)) == F32
    with pytest.raises(backends.OpNotImplementedError, match="Neg"):
        b.neg(x)
    with pytest.raises(backends.OpNotImplementedError, match="int32"):
        b.parameter("y", INTS)
