"""What is particular to the backend torch: configurations, compilation, capabilities, memory. Its operations are held
to NumPy's in test_conformance.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from easytorch import backends
from easytorch.backends import BackendError, OpNotImplementedError, make_shape
from easytorch.backends.dtypes import DType
from easytorch.backends.types import OP_TYPES, OpType, ReduceOpType


@pytest.fixture
def backend() -> backends.Backend:
    return backends.new("torch:cpu")


def _compiled(backend: backends.Backend, build: Callable[..., Any], *arrays: Any) -> backends.Executable:
    builder = backend.builder("test")
    ops = [builder.parameter(f"x{number}", make_shape(array.dtype, array.shape)) for number, array in enumerate(arrays)]
    result = build(builder, *ops)
    return builder.compile(*(result if isinstance(result, tuple) else (result,)))


def _run(backend: backends.Backend, build: Callable[..., Any], *arrays: np.ndarray) -> list[np.ndarray]:
    executable = _compiled(backend, build, *arrays)
    found = executable.execute([backend.buffer_from_numpy(array) for array in arrays])
    return [backend.buffer_to_numpy(buffer) for buffer in found]


@pytest.mark.parametrize("config", ["torch", "torch:cpu", "torch:compile", "torch:compile,cpu", "torch: cpu , compile"])
def test_configurations(config: str) -> None:
    made = backends.new(config)
    assert made.name == "torch"
    assert made.description.startswith(f"torch {torch.__version__}: ")
    assert ("torch.compile" in made.description) == ("compile" in config)


@pytest.mark.parametrize("config", ["nowhere", "cpu,cpu", "compile,compile", "meta", "cuda:99", "cpu,compile,fast"])
def test_configurations_that_are_not(config: str) -> None:
    with pytest.raises(BackendError, match=f"torch:{config}"):
        backends.new(f"torch:{config}")


def test_the_default_device_is_torchs() -> None:
    with torch.device("meta"), pytest.raises(BackendError, match="meta"):
        backends.new("torch")


def test_capabilities_have_every_operation_and_no_four_bit_types(backend: backends.Backend) -> None:
    capabilities = backend.capabilities()
    assert set(capabilities.operations) == set(OP_TYPES)
    assert set(DType) - capabilities.dtypes == {DType.INT4, DType.UINT4}
    assert not capabilities.supports(OpType.COS, DType.INT32)
    builder = backend.builder("narrow")
    with pytest.raises(OpNotImplementedError, match="int4"):
        builder.parameter("x", make_shape("int4", 2))


def test_a_compiled_graph_is_one_function_and_gives_the_same(backend: backends.Backend) -> None:
    torch._dynamo.reset()
    compiling = backends.new("torch:compile,cpu")
    x = np.random.default_rng(0).standard_normal((5, 6)).astype(np.float32)
    index = np.array([3, 2**31 + 1], np.uint32)

    def build(b: Any, x: Any, index: Any) -> Any:
        rows = b.gather(x, index, 1, (1,), (0,), (0,), (1, 6))
        total = b.reduce_sum(b.tanh(b.mul(rows, b.constant(np.float32(3)))), 1)
        return total, b.div(index, b.constant(np.uint32(3))), b.identity(x)

    eager, compiled = _run(backend, build, x, index), _run(compiling, build, x, index)
    for one, other in zip(eager, compiled, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    assert eager[1].tolist() == [1, (2**31 + 1) // 3]


def test_loops_and_branches_stay_outside_of_compiled_code() -> None:
    compiling = backends.new("torch:compile,cpu")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def build(b: Any, x: Any) -> Any:
        doubled = b.add(x, x)
        one = b.constant(np.float32(1))

        def body(inner: Any, count: Any, value: Any) -> Any:
            return inner.sub(count, inner.constant(np.int32(1))), inner.abs(
                inner.neg(inner.mul(value, inner.add(doubled, one)))
            )

        count, value = b.while_loop(
            lambda inner, count, _: inner.greater_than(count, inner.constant(np.int32(0))),
            body,
            b.constant(np.int32(2)),
            doubled,
        )
        (chosen,) = b.cond(
            b.equal(count, b.constant(np.int32(0))), lambda inner: inner.neg(value), lambda inner: doubled
        )
        return b.add(chosen, one)

    x = np.array([1.0, 2.0], np.float32)
    (found,) = _run(compiling, build, x)
    np.testing.assert_allclose(found, 1 - 2 * x * (2 * x + 1) ** 2, rtol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1


def test_memory_is_shared_with_numpy_and_torch(backend: backends.Backend) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    buffer = backend.buffer_from_numpy(array)
    array[0, 0] = 7
    assert backend.buffer_data(buffer)[0] == 7
    tensor = torch.zeros(2, 3, dtype=torch.bfloat16)
    assert backend.buffer_to_torch(backend.buffer_from_torch(tensor)).data_ptr() == tensor.data_ptr()
    turned = backend.buffer_from_torch(torch.arange(6).reshape(2, 3).t())
    assert backend.buffer_data(turned).tolist() == [0, 3, 1, 4, 2, 5]
    shared, flat = backend.new_shared_buffer(0, make_shape("uint16", 2, 2))
    flat[3] = 65535
    assert backend.buffer_to_torch(shared)[1, 1] == 65535


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype.bits >= 8], ids=str)
def test_elements_of_every_type_arrive(backend: backends.Backend, dtype: DType) -> None:
    flat = np.arange(6).astype(dtype.numpy)
    buffer = backend.buffer_from_flat_data(0, flat, make_shape(dtype, 2, 3))
    assert str(backend.buffer_shape(buffer)) == f"{dtype}[2, 3]"
    assert backend.buffer_to_torch(buffer).dtype == getattr(torch, dtype.value)
    executable = _compiled(backend, lambda b, x: b.reverse(x, 1), flat.reshape(2, 3))
    (found,) = executable.execute([buffer])
    copied = np.empty(6, dtype.numpy)
    backend.buffer_to_flat_data(found, copied)
    assert copied.tobytes() == flat.reshape(2, 3)[:, ::-1].tobytes()


def _updating(backend: backends.Backend) -> backends.Executable:
    """cache, row, index -> the cache with the row written, and its sum."""

    def build(b: Any, cache: Any, row: Any, index: Any) -> Any:
        updated = b.dynamic_update_slice(cache, row, [index, b.constant(np.int32(0))])
        return updated, b.reduce_sum(updated)

    return _compiled(backend, build, np.zeros((8, 4), np.float32), np.zeros((1, 4), np.float32), np.int32(0))


def test_a_donated_cache_is_updated_in_place(backend: backends.Backend) -> None:
    update = _updating(backend)
    row, index = (
        backend.buffer_from_numpy(np.ones((1, 4), np.float32)),
        backend.buffer_from_numpy(np.array(2, np.int32)),
    )
    cache = backend.buffer_from_flat_data(0, np.zeros(32, np.float32), make_shape("float32", 8, 4))
    address = cache.tensor.data_ptr()
    updated, _ = update.execute([cache, row, index], [True, False, False])
    assert updated.tensor.data_ptr() == address
    with pytest.raises(BackendError, match="donated"):
        backend.buffer_shape(cache)
    kept, total = update.execute([updated, row, index])
    assert kept.tensor.data_ptr() != address
    assert float(backend.buffer_to_numpy(total)) == 4


def test_memory_of_others_is_never_written_to(backend: backends.Backend) -> None:
    update = _updating(backend)
    row, index = (
        backend.buffer_from_numpy(np.ones((1, 4), np.float32)),
        backend.buffer_from_numpy(np.array(2, np.int32)),
    )
    array, tensor = np.zeros((8, 4), np.float32), torch.zeros(8, 4)
    lent = backend.buffer_from_flat_data(0, np.zeros(32, np.float32), make_shape("float32", 8, 4))
    view = backend.buffer_to_torch(lent)
    for buffer in (backend.buffer_from_numpy(array), backend.buffer_from_torch(tensor), lent):
        found, _ = update.execute([buffer, row, index], [True, False, False])
        assert found.tensor.sum() == 4
    assert not array.any() and not tensor.any() and not view.any()


def test_a_cache_that_is_read_again_is_copied(backend: backends.Backend) -> None:
    def build(b: Any, cache: Any, row: Any) -> Any:
        zero = b.constant(np.int32(0))
        updated = b.dynamic_update_slice(cache, row, [zero, zero])
        return updated, b.reduce_sum(b.reshape(cache, 8))

    executable = _compiled(backend, build, np.zeros((2, 4), np.float32), np.zeros((1, 4), np.float32))
    cache = backend.buffer_from_flat_data(0, np.zeros(8, np.float32), make_shape("float32", 2, 4))
    row = backend.buffer_from_numpy(np.ones((1, 4), np.float32))
    updated, total = executable.execute([cache, row], [True, False])
    assert float(backend.buffer_to_numpy(total)) == 0
    assert backend.buffer_to_numpy(updated).sum() == 4


def test_a_loop_leaves_its_initial_state_alone(backend: backends.Backend) -> None:
    def build(b: Any, cache: Any) -> Any:
        def body(inner: Any, index: Any, cache: Any) -> Any:
            row = inner.constant(np.ones((1, 4), np.float32))
            updated = inner.dynamic_update_slice(cache, row, [index, inner.constant(np.int32(0))])
            return inner.add(index, inner.constant(np.int32(1))), updated

        return b.while_loop(
            lambda inner, index, _: inner.less_than(index, inner.constant(np.int32(3))),
            body,
            b.constant(np.int32(0)),
            cache,
        )

    array = np.zeros((4, 4), np.float32)
    index, cache = _run(backend, build, array)
    assert index == 3 and not array.any()
    assert cache.sum(1).tolist() == [4, 4, 4, 0]


def test_what_a_closure_may_give_back_is_not_written_to(backend: backends.Backend) -> None:
    def build(b: Any, x: Any, row: Any) -> Any:
        zero = b.constant(np.int32(0))
        cache = b.add(x, x)
        (same,) = b.call(lambda inner, given: given, cache)
        return b.dynamic_update_slice(cache, row, [zero, zero]), b.neg(same)

    x, row = np.ones((2, 4), np.float32), np.zeros((1, 4), np.float32)
    updated, negative = _run(backend, build, x, row)
    assert updated.sum() == 8 and negative.sum() == -16

    def both(b: Any, x: Any) -> Any:
        def body(inner: Any, index: Any, cache: Any, other: Any) -> Any:
            zero = inner.constant(np.int32(0))
            updated = inner.dynamic_update_slice(cache, inner.constant(np.ones((1, 4), np.float32)), [index, zero])
            return (inner.add(index, inner.constant(np.int32(1))), updated, *inner.call(lambda _, y: y, cache))

        def more(inner: Any, index: Any, *_: Any) -> Any:
            return inner.less_than(index, inner.constant(np.int32(2)))

        return b.while_loop(more, body, b.constant(np.int32(0)), x, x)[1:]

    last, before = _run(backend, both, np.zeros((3, 4), np.float32))
    assert last.sum(1).tolist() == [4, 4, 0] and before.sum(1).tolist() == [4, 0, 0]


def test_outputs_are_memory_of_their_own(backend: backends.Backend) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)

    def build(b: Any, x: Any) -> Any:
        doubled = b.add(x, x)
        fixed = b.constant(np.float32(5))
        return x, b.reshape(x, 6), doubled, b.reshape(doubled, 6), fixed, b.iota(make_shape("int32", 3), 0)

    executable = _compiled(backend, build, array)
    for _ in range(2):
        found = executable.execute([backend.buffer_from_numpy(array)])
        assert len({buffer.tensor.data_ptr() for buffer in found} | {array.ctypes.data}) == 7
        assert all(buffer.tensor.is_contiguous() for buffer in found)
        np.testing.assert_array_equal(backend.buffer_to_numpy(found[3]), 2 * array.reshape(-1))
        assert backend.buffer_to_numpy(found[5]).tolist() == [0, 1, 2]
        for buffer in found:
            buffer.tensor.fill_(9)


def test_devices_get_memory_of_their_own(backend: backends.Backend) -> None:
    builder = backend.builder("pair", 2)
    x = builder.parameter("x", make_shape("float32", 3))
    executable = builder.compile(builder.all_reduce(x, ReduceOpType.SUM), x)
    given = [backend.buffer_from_numpy(np.full(3, device, np.float32), device) for device in range(2)]
    found = executable.execute(given)
    assert len({buffer.tensor.data_ptr() for buffer in (*given, *found)}) == 6
    assert [backend.buffer_to_numpy(buffer)[0] for buffer in found] == [1, 0, 1, 1]


def test_a_buffer_stays_on_its_device(backend: backends.Backend) -> None:
    executable = _compiled(backend, lambda b, x: b.neg(x), np.zeros(2, np.float32))
    with pytest.raises(BackendError, match="device 1"):
        executable.execute([backend.buffer_from_numpy(np.zeros(2, np.float32), 1)])
    with pytest.raises(BackendError, match="none of the 8"):
        backend.buffer_from_numpy(np.zeros(2, np.float32), 8)


def test_programs_do_not_follow_gradients(backend: backends.Backend) -> None:
    weight = torch.ones(3, requires_grad=True)
    executable = _compiled(backend, lambda b, x: b.exp(x), np.zeros(3, np.float32))
    (found,) = executable.execute([backend.buffer_from_torch(weight)])
    assert not backend.buffer_to_torch(found).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("additive", [False, True])
def test_attention_to_nothing_is_zero(
    backend: backends.Backend, dtype: torch.dtype, causal: bool, additive: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 5, 8, generator=generator).to(dtype) for heads in (4, 2, 2))
    allowed = torch.rand(2, 1, 5, 5, generator=generator) < 0.6
    allowed[:, :, 3] = False
    mask = torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, -torch.inf) if additive else allowed
    builder = backend.builder("attention")
    given = [query, key, value, mask]
    ops = [builder.parameter(f"x{number}", make_shape(x.dtype, tuple(x.shape))) for number, x in enumerate(given)]
    executable = builder.compile(builder.scaled_dot_product_attention(*ops, is_causal=causal))
    found = backend.buffer_to_torch(executable.execute([backend.buffer_from_torch(x) for x in given])[0])
    scores = query.double() @ key.double().repeat_interleave(2, 1).mT * 8**-0.5
    attends = allowed & torch.ones(5, 5, dtype=torch.bool).tril() if causal else allowed
    weights = torch.softmax(scores.masked_fill(~attends, -torch.inf), -1).nan_to_num(0)
    wanted = weights @ value.double().repeat_interleave(2, 1)
    assert not found[:, :, 3].any()
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol={2: 2e-2, 4: 1e-5}[found.itemsize])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keys", [1, 6, 15, 16, 17])
def test_a_query_of_nan_attends_to_nan(backend: backends.Backend, keys: int, causal: bool, dtype: torch.dtype) -> None:
    """Beside few keys the maximum of ATen's kernel skips it, and its row would be zeros."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(1, heads, keys, 8, generator=generator).to(dtype) for heads in (4, 2, 2)]
    given[0][0, 1, -1] = torch.nan
    builder = backend.builder("attention")
    ops = [builder.parameter(f"x{number}", make_shape(x.dtype, tuple(x.shape))) for number, x in enumerate(given)]
    executable = builder.compile(builder.scaled_dot_product_attention(*ops, is_causal=causal))
    found = backend.buffer_to_torch(executable.execute([backend.buffer_from_torch(x) for x in given])[0])
    wanted = torch.zeros_like(found, dtype=torch.bool)
    wanted[0, 1, -1] = True
    assert torch.equal(found.isnan(), wanted)


def test_one_rounding_from_wide_to_narrow(backend: backends.Backend) -> None:
    # Just above the middle of two float16: rounded to float32 first, they would fall on the middle and go to the even.
    close = np.array([1 + 2.0**-11 + 2.0**-40, -1 - 2.0**-11 - 2.0**-40, 65519.9999999, 2.0**-25 + 2.0**-60])
    (found,) = _run(backend, lambda b, x: b.convert_dtype(x, "float16"), close)
    np.testing.assert_array_equal(found, close.astype(np.float16))


def test_a_sort_by_any_comparator_is_stable(backend: backends.Backend) -> None:
    keys = np.array([[5, 1, 4, 1, 5, 9, 2, 6, 5, 3]], np.int32).repeat(3, 0)
    places = np.arange(10, dtype=np.int32)[None].repeat(3, 0)

    def by_parity(inner: Any, one: Any, other: Any, *_: Any) -> Any:
        two = inner.constant(np.int32(2))
        return inner.less_than(inner.rem(one, two), inner.rem(other, two))

    found = _run(backend, lambda b, x, y: b.sort(by_parity, 1, True, x, y), keys, places)
    order = np.argsort(keys[0] % 2, kind="stable")
    assert found[1][2].tolist() == order.tolist() and found[0][1].tolist() == keys[0][order].tolist()
    found = _run(backend, lambda b, x, y: b.sort(lambda i, a, c, *_: i.less_than(c, a), 1, True, x, y), keys, places)
    assert found[1][0].tolist() == np.argsort(-keys[0], kind="stable").tolist()


@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.uint32])
@pytest.mark.parametrize("kind", list(ReduceOpType)[1:], ids=str)
def test_a_window_of_all_before_is_a_scan(backend: backends.Backend, kind: ReduceOpType, dtype: type) -> None:
    x = np.random.default_rng(1).integers(1, 120, (3, 9)).astype(dtype)
    if kind is ReduceOpType.PRODUCT:
        x %= 4
    if dtype is np.float32 and kind in (ReduceOpType.MAX, ReduceOpType.MIN):
        x[1, 4] = np.nan
    if dtype is np.uint32:
        x += np.uint32(2**31) * (x % 2)
    for window in (9, 11):
        pads = [(0, 0), (window - 1, 0)]
        build = functools.partial(_windows, kind=kind, window=window, pads=pads)
        (found,) = _run(backend, build, x)
        scan = {"Sum": np.add, "Product": np.multiply, "Max": np.maximum, "Min": np.minimum}[str(kind)]
        np.testing.assert_array_equal(found, scan.accumulate(x, 1, dtype=dtype))


def _windows(b: Any, x: Any, kind: ReduceOpType, window: int, pads: Any) -> Any:
    return b.reduce_window(x, kind, [1, window], [1, 1], None, None, pads)
