"""tensorstore's writes: none is in flight when a conversion goes on, ends or removes its folder."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.formats.pending_writes import PendingWrites, finished
from easytorch.bridge.formats.zarr_folders import arrays as zarr_arrays

LONG = 60


class Future:
    """As a `tensorstore.WriteFutures`; waiting for it is interrupted `interruptions` times."""

    def __init__(self, interruptions=0, error=None):
        self.copy = self
        self.ended = False
        self._left = interruptions
        self._error = error

    def done(self):
        return self.ended

    def exception(self):
        if self._left:
            self._left -= 1
            raise KeyboardInterrupt
        self.ended = True
        return self._error

    def result(self):
        if (error := self.exception()) is not None:
            raise error
        return "made"


def test_an_operation_has_ended_when_the_wait_for_it_is_interrupted():
    future = Future(interruptions=3)
    with pytest.raises(KeyboardInterrupt):
        finished(future)
    assert future.ended
    assert finished(Future()) == "made"
    with pytest.raises(OSError, match="full"):
        finished(Future(error=OSError("full")))


def test_writes_have_ended_whatever_ends_the_block():
    futures = [Future(), Future(error=OSError("full")), Future(interruptions=1)]
    for future in futures:
        # The copy was made; the write goes on.
        future.copy = SimpleNamespace(result=lambda: None)
    with pytest.raises(KeyboardInterrupt), PendingWrites() as pending:
        for future in futures:
            pending.add(future, 1)
        raise OSError("met by the reader")
    assert all(future.ended for future in futures)


def test_a_write_of_tensorstores_has_ended():
    ts = pytest.importorskip("tensorstore")
    promise, commit = ts.Promise.new()
    copied, copy = ts.Promise.new()
    copied.set_result(None)
    ended, go = threading.Event(), threading.Event()

    def write():
        go.wait(LONG)
        ended.set()
        promise.set_exception(ValueError("met by the write"))

    thread = threading.Thread(target=write)
    thread.start()
    with pytest.raises(ValueError, match="met by the reader"), PendingWrites() as pending:
        future = SimpleNamespace(copy=copy, result=commit.result, exception=commit.exception, done=commit.done)
        pending.add(future, 1)
        threading.Timer(0.01, go.set).start()
        raise ValueError("met by the reader")
    assert ended.is_set()
    thread.join()


def test_a_zarr_folder_is_written_one_chunk_at_a_time(tmp_path, monkeypatch):
    """A write of several ends with the first that fails, and the others would make the folder again."""
    writes, opened = [], Future(interruptions=1)

    class Store:
        def __getitem__(self, box):
            shape = tuple(one.stop - one.start for one in box)
            futures = [Future(error=OSError("full") if len(writes) == 2 else None) for _ in range(1)]
            return SimpleNamespace(write=lambda block: writes.append((shape, futures[0])) or futures[0])

    fake = SimpleNamespace(open=lambda *given, **named: opened, dtype=np.dtype)
    monkeypatch.setattr(zarr_arrays, "load_tensorstore", lambda: fake)
    monkeypatch.setattr(zarr_arrays, "new_context", lambda: None)
    monkeypatch.setattr(zarr_arrays, "chunk_shape", lambda info: (4, 3))
    info, array = TensorInfo("a", (10, 3), "float32"), np.ones((10, 3), np.float32)
    with pytest.raises(KeyboardInterrupt):
        zarr_arrays.write_folder(tmp_path / "a", info, array)
    assert opened.ended and not writes
    monkeypatch.setattr(opened, "result", Store)
    with pytest.raises(OSError, match="full"):
        zarr_arrays.write_folder(tmp_path / "a", info, array)
    assert [shape for shape, _ in writes] == [(4, 3), (4, 3), (2, 3)]
    assert all(future.ended for _, future in writes)
