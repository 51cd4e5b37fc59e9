"""What the backend `xla` does beyond operations: donation, memory, devices, its cache on disk, other platforms."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from easytorch import backends
from easytorch.backends import BackendError, make_shape

jax = pytest.importorskip("jax")
F32 = make_shape("float32", 16)


@pytest.fixture(params=["xla:cpu", "xla:jit:cpu"])
def xla(request: pytest.FixtureRequest) -> backends.Backend:
    return backends.new(request.param)


def _program(backend: backends.Backend, shape: backends.Shape = F32) -> backends.Executable:
    builder = backend.builder("two inputs")
    x, y = builder.parameter("x", shape), builder.parameter("y", shape)
    return builder.compile(builder.add(x, y), builder.mul(x, y))


def _aligned(count: int) -> np.ndarray:
    memory = np.zeros(count * 4 + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + count * 4].view(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "complex128", "bfloat16", "int4", "bool"])
def test_programs_of_both_kinds_keep_every_type(xla: backends.Backend, dtype: str) -> None:
    shape = make_shape(dtype, 3)
    values = np.array([0, 1, 1]).astype(shape.dtype.numpy)
    buffers = [xla.buffer_from_numpy(values)] * 2
    total, product = (xla.buffer_to_numpy(result) for result in _program(xla, shape).execute(buffers))
    assert total.dtype == product.dtype == shape.dtype.numpy
    np.testing.assert_array_equal(product.astype(np.complex64), values.astype(np.complex64))


def test_a_donated_buffer_is_refused_everywhere(xla: backends.Backend) -> None:
    program = _program(xla)
    given, kept = (xla.buffer_from_numpy(np.full(16, 3, np.float32)) for _ in range(2))
    total, product = program.execute([given, kept], donate=[True, False])
    np.testing.assert_array_equal(xla.buffer_to_numpy(total), np.full(16, 6))
    np.testing.assert_array_equal(xla.buffer_to_numpy(product), np.full(16, 9))
    np.testing.assert_array_equal(xla.buffer_to_numpy(kept), np.full(16, 3))
    for use in (xla.buffer_shape, xla.buffer_to_numpy, xla.buffer_data, xla.buffer_device_num, xla.buffer_finalize):
        with pytest.raises(BackendError, match="donated"):
            use(given)
    with pytest.raises(BackendError, match="donated"):
        program.execute([given, kept])


def test_an_output_takes_the_memory_of_a_donated_buffer() -> None:
    xla = backends.new("xla:cpu")
    program = _program(xla)
    first = program.execute([xla.buffer_from_numpy(np.ones(16, np.float32))] * 2)
    pointer = first[0].array.unsafe_buffer_pointer()
    total, _ = program.execute(first, donate=[True, False])
    assert total.array.unsafe_buffer_pointer() == pointer


def test_memory_of_others_is_not_donated_away(xla: backends.Backend) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.full((16,), 2.0)
    (total, _) = _program(xla).execute(
        [xla.buffer_from_torch(tensor), xla.buffer_from_numpy(np.ones(16, np.float32))], [True, True]
    )
    seen = xla.buffer_to_torch(total)
    (again, _) = _program(xla).execute([total, xla.buffer_from_numpy(np.ones(16, np.float32))], [True, False])
    assert tensor.tolist() == [2.0] * 16
    assert seen.tolist() == [3.0] * 16
    assert xla.buffer_to_numpy(again).tolist() == [4.0] * 16


def test_a_buffer_is_not_donated_twice(xla: backends.Backend) -> None:
    buffer = xla.buffer_from_numpy(np.ones(16, np.float32))
    with pytest.raises(BackendError, match="a second time"):
        _program(xla).execute([buffer, buffer], donate=[True, False])
    assert xla.buffer_to_numpy(buffer).tolist() == [1.0] * 16


def test_wrong_inputs_are_refused(xla: backends.Backend) -> None:
    program, right = _program(xla), xla.buffer_from_numpy(np.ones(16, np.float32))
    # As many bytes: PJRT would take them.
    for wrong in (np.ones(16, np.int32), np.ones((4, 4), np.float32), np.ones(8, np.float64)):
        with pytest.raises(BackendError, match="input 1"):
            program.execute([right, xla.buffer_from_numpy(wrong)])
    with pytest.raises(BackendError, match="takes 2 inputs"):
        program.execute([right])
    with pytest.raises(BackendError, match="no buffer"):
        program.execute([right, np.ones(16, np.float32)])
    xla.buffer_finalize(right)
    with pytest.raises(BackendError, match="finalized"):
        program.execute([right, right])
    program.finalize()
    with pytest.raises(BackendError, match="finalized"):
        program.execute([])


def test_memory_is_shared_with_numpy_and_torch() -> None:
    torch = pytest.importorskip("torch")
    xla = backends.new("xla:cpu")
    array = _aligned(16)
    assert np.shares_memory(xla.buffer_to_numpy(xla.buffer_from_numpy(array)), array)
    tensor = torch.from_numpy(array)
    buffer = xla.buffer_from_torch(tensor)
    assert xla.buffer_to_torch(buffer).data_ptr() == tensor.data_ptr()
    shared, data = xla.new_shared_buffer(0, F32)
    data[:] = 5
    assert xla.buffer_to_numpy(_program(xla).execute([shared, shared])[0]).tolist() == [10.0] * 16
    assert xla.buffer_data(shared) is data


def test_flat_data_is_copied(xla: backends.Backend) -> None:
    array = _aligned(16)
    buffer = xla.buffer_from_flat_data(0, array, F32)
    array[:] = 7
    found = np.empty(16, np.float32)
    xla.buffer_to_flat_data(buffer, found)
    assert found.tolist() == [0.0] * 16


@pytest.mark.parametrize("dtype", ["float8_e5m2", "bfloat16", "complex64", "int64", "bool", "uint16"])
def test_torch_and_back(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    xla = backends.new("xla:cpu")
    tensor = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(getattr(torch, dtype)).T
    buffer = xla.buffer_from_torch(tensor)
    assert xla.buffer_shape(buffer) == make_shape(dtype, 3, 2)
    back = xla.buffer_to_torch(buffer)
    assert back.dtype == tensor.dtype and back.to(torch.complex64).equal(tensor.to(torch.complex64))


def test_programs_are_cached_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from easytorch.backends.xla import cache, pjrt

    monkeypatch.setenv(cache.CACHE_ENV_VAR, str(tmp_path))
    xla = backends.new("xla:cpu")
    compiled: list[str] = []
    compile_module = pjrt.compile_module
    monkeypatch.setattr(
        pjrt, "compile_module", lambda text, *rest: compiled.append(text) or compile_module(text, *rest)
    )

    def run() -> Any:
        buffers = [xla.buffer_from_numpy(np.ones(16, np.float32))] * 2
        return xla.buffer_to_numpy(_program(xla).execute(buffers)[0]).tolist()

    assert run() == run() == [2.0] * 16
    assert len(compiled) == 1
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-100])
    assert run() == [2.0] * 16
    assert len(compiled) == 2, "a damaged entry is compiled anew"
    monkeypatch.setattr(cache, "LIMIT_BYTES", 1)
    _program(xla, make_shape("float32", 3))
    assert list(tmp_path.iterdir()) == [], "the folder is bounded"


_ON_TWO = """
import numpy as np
from easytorch import backends
xla = backends.new("xla:cpu")
builder = xla.builder("sum", 2)
x = builder.parameter("x", backends.make_shape("float64", 3))
program = builder.compile(builder.all_reduce(x, backends.ReduceOpType.SUM), x)
inputs = [xla.buffer_from_numpy(np.full(3, 1.0 + device), device) for device in range(2)]
try:
    program.execute(inputs[::-1])
except backends.BackendError as error:
    assert "device" in str(error)
for donate in (None, [True, True]):
    found = program.execute(inputs, donate)
    assert [xla.buffer_device_num(buffer) for buffer in found] == [0, 0, 1, 1]
    assert [xla.buffer_to_numpy(buffer)[0] for buffer in found] == [3, 1, 3, 2]
print("done")
"""


def test_programs_run_on_several_devices() -> None:
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "EASYTORCH_XLA_CACHE": "",
    }
    done = subprocess.run(
        [sys.executable, "-c", _ON_TWO], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.stdout == "done\n", done.stderr


@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm", "tpu"])
def test_graphs_are_lowered_for_platforms_that_are_not_here(platform: str) -> None:
    pytest.importorskip("flatbuffers")
    from easytorch.backends.xla.export import lower

    builder = backends.new("xla:cpu").builder("lowered")
    x = builder.parameter("x", F32)
    builder.compile(builder.erf(x))
    found = jax.export.deserialize(bytearray(lower(builder.graph, platform)))
    assert found.platforms == (platform,)
    if platform == "cpu":
        (result,) = found.call(np.zeros(16, np.float32))
        assert result.shape == (16,) and not result.any()
    with pytest.raises(BackendError, match="known: cpu"):
        lower(builder.graph, "abacus")


def test_an_unknown_platform_is_an_error() -> None:
    with pytest.raises(BackendError, match="abacus"):
        backends.new("xla:abacus")


def test_the_text_grows_with_the_graph() -> None:
    from easytorch.backends.xla.stablehlo import emit

    lengths = []
    for count in (100, 200, 400):
        builder = backends.new("xla:cpu").builder("chain")
        x = builder.parameter("x", F32)
        for _ in range(count):
            x = builder.tanh(x)
        builder.graph.outputs = (x,)
        lengths.append(len(emit(builder.graph).splitlines()))
    assert lengths[2] - lengths[1] == 200 and lengths[1] - lengths[0] == 100
