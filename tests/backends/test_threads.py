"""Backends from many threads: a donated buffer has one taker, finalizing ends in errors, builders are apart."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from easytorch import backends
from easytorch.backends import BackendError, make_shape
from easytorch.backends.executable import TAKING

NAMES = ("numpy", "torch", "xla")
THREADS = 6
SHAPE = make_shape("float32", 64)


def together(count: int, function: Callable[[int], Any]) -> list[Any]:
    """What the threads give that run `function` at once: results, or the `BackendError`s."""
    start = threading.Barrier(count)
    results: list[Any] = [None] * count

    def run(number: int) -> None:
        start.wait()
        try:
            results[number] = function(number)
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    others = [found for found in results if isinstance(found, BaseException) and not isinstance(found, BackendError)]
    assert not others, others
    return results


def adding(backend: backends.Backend, number: float = 1.0) -> backends.Executable:
    b = backend.builder("adding")
    return b.compile(b.add(b.parameter("x", SHAPE), b.constant(np.float32(number))))


@pytest.mark.parametrize("name", NAMES)
def test_a_donated_buffer_has_one_taker(name: str, backend_of: Callable[[str], Any]) -> None:
    backend = backend_of(name)
    executable = adding(backend)
    for _ in range(30):
        buffer = backend.buffer_from_numpy(np.ones(64, np.float32))
        results = together(THREADS, lambda number: executable.execute([buffer], [True]))  # noqa: B023
        won = [found for found in results if not isinstance(found, BackendError)]
        assert len(won) == 1
        np.testing.assert_array_equal(backend.buffer_to_numpy(won[0][0]), np.full(64, 2, np.float32))


@pytest.mark.parametrize("name", NAMES)
def test_a_buffer_being_taken_is_seen_by_nobody_else(
    name: str, backend_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between comparing a buffer and taking it a thread holds the lock, which no other can then enter."""
    backend = backend_of(name)
    executable, buffer = adding(backend), backend.buffer_from_numpy(np.ones(64, np.float32))
    take = executable._take
    entered: list[bool] = []

    def enter() -> None:  # does not wait, so nothing depends on speed
        entered.append(TAKING.acquire(blocking=False))
        if entered[-1]:
            TAKING.release()

    def observed(*args: Any) -> Any:
        other = threading.Thread(target=enter)
        other.start()
        other.join()
        return take(*args)

    monkeypatch.setattr(executable, "_take", observed)
    (found,) = executable.execute([buffer], [True])
    np.testing.assert_array_equal(backend.buffer_to_numpy(found), np.full(64, 2, np.float32))
    assert entered == [False]


@pytest.mark.parametrize("name", NAMES)
def test_what_others_read_is_not_written_to(name: str, backend_of: Callable[[str], Any]) -> None:
    """Readers and a donor of one buffer: whoever got it saw ones."""
    backend = backend_of(name)
    shape = make_shape("float32", 50_000)
    b = backend.builder("update")
    x = b.parameter("x", shape)
    start = b.constant(np.int32(0))
    update = b.compile(b.dynamic_update_slice(x, b.broadcast(b.constant(np.float32(7)), 50_000), (start,)))
    b = backend.builder("read")
    x = b.parameter("x", shape)
    read = b.compile(b.reduce_sum(b.mul(b.exp(b.sin(x)), b.constant(np.float32(0)))), b.reduce_sum(x))
    for _ in range(10):
        buffer = backend.buffer_from_flat_data(0, np.ones(50_000, np.float32), shape)

        def use(number: int, buffer: Any = buffer) -> Any:
            if number == 0:
                update.execute([buffer], [True])
                return None
            return float(backend.buffer_to_numpy(read.execute([buffer])[1]))

        assert {found for found in together(4, use) if isinstance(found, float)} <= {50_000.0}


@pytest.mark.parametrize("name", NAMES)
def test_finalized_while_it_runs(name: str, backend_of: Callable[[str], Any]) -> None:
    backend = backend_of(name)
    for _ in range(10):
        executable, buffer = adding(backend), backend.buffer_from_numpy(np.ones(64, np.float32))

        def use(number: int, executable: Any = executable, buffer: Any = buffer) -> Any:
            if number == 0:
                return executable.finalize()
            if number == 1:
                return backend.buffer_finalize(buffer)
            for _ in range(20):
                (found,) = executable.execute([buffer])
                np.testing.assert_array_equal(backend.buffer_to_numpy(found), np.full(64, 2, np.float32))
            return None

        together(THREADS, use)


@pytest.mark.parametrize("name", NAMES)
def test_builders_of_many_threads(name: str, backend_of: Callable[[str], Any]) -> None:
    backend = backend_of(name)
    ones = backend.buffer_from_numpy(np.ones(64, np.float32))

    def use(number: int) -> float:
        (found,) = adding(backend, float(number)).execute([ones])
        return float(backend.buffer_to_numpy(found)[0])

    assert together(THREADS, use) == [1.0 + number for number in range(THREADS)]


@pytest.mark.parametrize("name", NAMES)
def test_a_shared_buffer_is_not_donated(name: str, backend_of: Callable[[str], Any]) -> None:
    backend = backend_of(name)
    buffer, flat = backend.new_shared_buffer(0, SHAPE)
    with pytest.raises(BackendError, match="input 0 is a shared buffer"):
        adding(backend).execute([buffer], [True])
    flat[:] = 3
    (found,) = adding(backend).execute([buffer])
    np.testing.assert_array_equal(backend.buffer_to_numpy(found), np.full(64, 4, np.float32))


@pytest.mark.parametrize("name", NAMES)
def test_a_finalized_buffer_lets_go_of_shared_memory(name: str, backend_of: Callable[[str], Any]) -> None:
    backend = backend_of(name)
    buffer, flat = backend.new_shared_buffer(0, SHAPE)
    backend.buffer_finalize(buffer)
    held = [one for one in gc.get_referents(buffer) if isinstance(one, np.ndarray)]
    assert not any(np.shares_memory(one, flat) for one in held)
