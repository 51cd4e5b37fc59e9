"""Sizes at the end of what integers, arrays and machines hold: a `BackendError` or a result, and never an abort."""

from __future__ import annotations

import faulthandler
import multiprocessing
import random
import resource
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from easytorch import backends
from easytorch.backends import BackendError, OpType, PadAxis, ReduceOpType, Shape, make_shape
from easytorch.backends.dtypes import DType
from easytorch.backends.shapes import MAX_BYTES, MAX_RANK
from easytorch.backends.types import ConvolveAxesConfig

NAMES = ("numpy", "torch", "xla")
EXTREME = (0, 1, 2, 3, -1, 2**15, 2**31 - 1, 2**31, 2**32, 2**45, 2**47, 2**61, 2**62, 2**63 - 1, 2**63, -(2**62))
CASES = 60
MEMORY = 8 << 30


def test_shapes() -> None:
    for dimensions in ((2**62, 4), (2**31, 2**31), (2**63,), (0, 2**62, 4), (-1,), (1,) * (MAX_RANK + 1)):
        with pytest.raises(BackendError):
            make_shape("float32", dimensions)
        with pytest.raises(BackendError):
            Shape(DType.FLOAT32, dimensions)
    assert make_shape("float32", MAX_BYTES // 4).nbytes == MAX_BYTES
    assert make_shape("float32", (1,) * MAX_RANK).rank == MAX_RANK
    with pytest.raises(BackendError, match=r"2\*\*47"):
        make_shape("float32", MAX_BYTES // 4 + 1)


def _number(source: random.Random) -> int:
    return source.choice(EXTREME) if source.random() < 0.5 else source.randint(0, 4)


def _numbers(source: random.Random, count: int) -> list[int]:
    return [_number(source) for _ in range(count)]


def _added(b: backends.Builder, x: backends.Op, source: random.Random) -> backends.Op:
    """Some operation of x whose sizes are numbers of `source`."""
    rank, dtype = x.shape.rank, x.shape.dtype
    n = lambda count=rank: _numbers(source, count)  # noqa: E731
    zero = b.constant(np.zeros((), dtype.numpy))
    index = b.constant(np.int32(0))
    ends = [n(2) for _ in range(rank)]
    conv = ConvolveAxesConfig(0, 1, (2,), 0, 1, (2,), 0, 1, (2,))
    choices: list[Callable[[], Any]] = [
        lambda: b.broadcast(x, n(2)),
        lambda: b.broadcast_in_dim(x, make_shape(dtype, n(rank + 1)), range(1, rank + 1)),
        lambda: b.broadcast_in_dim(b.reshape(x, [1] * rank), make_shape(dtype, n()), range(rank)),
        lambda: b.reshape(x, n(3)),
        lambda: b.iota(make_shape(dtype, n()), 0),
        lambda: b.pad(x, zero, *(PadAxis(*n(3)) for _ in range(rank))),
        lambda: b.slice(x, n(), n(), n()),
        lambda: b.dynamic_slice(x, [index] * rank, n()),
        lambda: b.reduce_window(x, ReduceOpType.SUM, n(), n(), n(), n(), ends),
        lambda: b.reduce_window(x, ReduceOpType.MAX, [1] * rank, n(), None, None, ends),
        lambda: b.select_and_scatter_sum(x, x, n(), n(), ends),
        lambda: b.conv_general_dilated(x, x, conv, n(1), [n(2)], n(1), n(1), *n(2)),
        lambda: b.fft(b.complex(x, x), 0, n(1)),
        lambda: b.gather(x, index, 0, range(rank), (), (0,), n()),
        lambda: b.concatenate(0, *[b.broadcast_in_dim(zero, make_shape(dtype, n()), ())] * 3),
        lambda: b.dot_general(b.broadcast(zero, n(2)), (0,), (), b.broadcast(zero, n(2)), (0,), ()),
        lambda: b.rng_bit_generator(b.constant(np.zeros(3, np.uint64)), make_shape("uint8", n()))[1],
        lambda: b.constant(np.zeros(2, dtype.numpy), *n(2)),
        lambda: b.bitcast(b.broadcast(zero, n(2)), "uint8"),
        lambda: b.parameter("huge", make_shape(dtype, n())),
        lambda: b.transpose(x, n()),
        lambda: b.reduce_sum(x, n(1)),
        lambda: b.reshape(x, [1] * source.choice((31, 32, 33, 64, 65))),
        lambda: b.all_gather(x, *n(1)),
        lambda: b.arg_min_max(b.broadcast(zero, n(1)), 0, "int8", True),
        lambda: b.reduce_precision(x, *n(2)),
    ]
    found: backends.Op = source.choice(choices)()
    return found


def _case(backend: backends.Backend, seed: str) -> None:
    source = random.Random(seed)
    b = backend.builder("sizes")
    x = b.parameter("x", make_shape("float32", 2, 3, 2))
    try:
        found = _added(b, x, source)
        count = found.shape.size
        # Compiled whatever the size; run where there is room for it and for what it is computed from.
        program = b.compile(found if count < 10**6 else b.reduce_max(found))
        if count < 10**6 and len(program.inputs()[0]) == 1:
            program.execute([backend.buffer_from_numpy(np.ones((2, 3, 2), np.float32))])
    except BackendError:
        pass


def _cases(sender: Connection, name: str, seed: int, count: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    faulthandler.disable()
    backend = backends.new(name)
    for number in range(count):
        case = f"{name} {seed} {number}"
        sender.send(("begins", case))
        try:
            _case(backend, case)
        except Exception:
            sender.send(("raised", f"{case}: {traceback.format_exc(limit=-4)}"))
    sender.send(("done", ""))


def failures(name: str, seed: int, count: int, timeout: float = 60) -> list[str]:
    """What went wrong in `count` cases, run in a process that may end: then the rest are not run."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_cases, args=(sender, name, seed, count), daemon=True)
    process.start()
    sender.close()
    found, last = [], "the start"
    try:
        while receiver.poll(timeout):
            what, text = receiver.recv()
            if what == "done":
                return found
            if what == "raised":
                found.append(text)
            last = text
        return [*found, f"{last}: took more than {timeout} s"]
    except EOFError:
        process.join()
        return [*found, f"{last}: ended the process ({process.exitcode})"]
    finally:
        process.kill()


@pytest.mark.parametrize("name", NAMES)
def test_no_size_ends_the_process(name: str, backend_of: Callable[[str], Any]) -> None:
    backend_of(name)
    found = failures(name, 0, CASES)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_there_is_no_memory_for_what_is_prepared(name: str, backend_of: Callable[[str], Any]) -> None:
    """Of tables that a backend makes before it runs: counters of random bits, and counts."""
    backend = backend_of(name)
    b = backend.builder("random")
    drawn = b.rng_bit_generator(b.constant(np.zeros(3, np.uint64)), make_shape("uint64", MAX_BYTES // 8))[1]
    with pytest.raises(BackendError):
        b.compile(b.reduce_max(drawn)).execute([])
    b = backend.builder("counted")
    with pytest.raises(BackendError):
        b.compile(b.reduce_max(b.iota(make_shape("int64", MAX_BYTES // 8), 0))).execute([])


@pytest.mark.parametrize("name", NAMES)
def test_random_bits_of_nothing(name: str, backend_of: Callable[[str], Any]) -> None:
    """Not a loop over the axes that are not empty."""
    backend = backend_of(name)
    b = backend.builder("nothing")
    shape = make_shape("uint8", 1, 2**31 - 1, 0)
    state = np.arange(3, dtype=np.uint64)
    program = b.compile(*b.rng_bit_generator(b.constant(state), shape))
    after, drawn = map(backend.buffer_to_numpy, program.execute([]))
    assert drawn.shape == shape.dimensions
    np.testing.assert_array_equal(after, state)


def test_xla_folds_no_large_values(backend_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its evaluator takes minutes over them, and aborts the process where there is no room."""
    backend = backend_of("xla")
    from easytorch.backends.xla import cache

    class NotCompiled(Exception):
        pass

    given: list[bool] = []

    def recorded(text: str, devices: Any, folding: bool, partitioned: bool) -> None:
        assert not partitioned
        given.append(folding)
        raise NotCompiled

    monkeypatch.setattr(cache, "compile_module", recorded)

    def folding(build: Callable[[backends.Builder, backends.Op], backends.Op]) -> bool:
        b = backend.builder("folded")
        with pytest.raises(NotCompiled):
            b.compile(build(b, b.parameter("x", make_shape("float32"))))
        return given.pop()

    def zeros(b: backends.Builder) -> backends.Op:
        return b.broadcast(b.constant(np.float32(0)), [2**32])

    assert not folding(lambda b, x: b.add(b.reduce_max(zeros(b)), x))
    assert not folding(lambda b, x: b.convert_dtype(b.arg_min_max(zeros(b), 0, "int32", True), "float32"))
    # In a branch, of what it captures.
    assert not folding(lambda b, x: b.cond(b.is_nan(x), lambda c: c.reduce_max(zeros(c)), lambda c: x)[0])
    assert folding(lambda b, x: b.reduce_max(b.broadcast(x, [2**32])))
    assert folding(lambda b, x: b.cond(b.is_nan(x), lambda c: c.reduce_max(c.broadcast(x, [2**32])), lambda c: x)[0])
    assert folding(lambda b, x: b.add(b.reduce_max(b.broadcast(b.constant(np.float32(0)), [2**10])), x))


@pytest.mark.parametrize("name", NAMES)
def test_there_is_no_memory(name: str, backend_of: Callable[[str], Any]) -> None:
    backend = backend_of(name)
    huge = make_shape("float32", 2**44)
    b = backend.builder("huge")
    x = b.parameter("x", make_shape("float32"))
    program = b.compile(b.sin(b.broadcast_in_dim(x, huge, ())))
    with pytest.raises(BackendError):
        program.execute([backend.buffer_from_numpy(np.ones((), np.float32))])
    with pytest.raises(BackendError):
        backend.new_shared_buffer(0, huge)
    assert OpType.SIN in backend.capabilities().operations


def test_a_repeated_element_is_looked_at_once(backend_of: Callable[[str], Any]) -> None:
    """The extreme of a broadcast, which torch has without memory: as a loop over 2**40 elements it took hours."""
    backend = backend_of("torch")
    b = backend.builder("repeated")
    x, flags = b.parameter("x", make_shape("float32", 3)), b.parameter("flags", make_shape("bool", 3))
    many = b.broadcast_in_dim(x, make_shape("float32", 3, 2**40), (0,))
    bits = b.broadcast_in_dim(b.convert_dtype(flags, "int32"), make_shape("int32", 3, 2**40), (0,))
    truths = b.broadcast_in_dim(flags, make_shape("bool", 3, 2**40), (0,))
    reduced = [b.reduce_max(many, [1]), b.reduce_min(many, [1]), b.arg_min_max(many, 1, "int32", True)]
    reduced += [b.reduce_bitwise_and(bits, [1]), b.reduce_bitwise_or(bits, [1])]
    reduced += [b.reduce_logical_and(truths, [1]), b.reduce_logical_or(truths, [1])]
    given = np.array([1.0, np.nan, -2.0], np.float32), np.array([True, False, True])
    found = b.compile(*reduced).execute([backend.buffer_from_numpy(array) for array in given])
    expected = [given[0], given[0], np.zeros(3, np.int32), *[given[1].astype(np.int32)] * 2, *[given[1]] * 2]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(backend.buffer_to_numpy(one), other)
