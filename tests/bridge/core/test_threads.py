"""No thread outlives its block, also where Ctrl-C comes while the block waits for it."""

import concurrent.futures
import threading

import pytest

from easytorch.bridge.core.interruptions import uninterrupted
from easytorch.bridge.core.threads import Threads

# Longer than any machine takes; what ends without it ends at once.
LONG = 60


@pytest.fixture
def interrupted_once(monkeypatch):
    """Ctrl-C during the first wait for futures."""
    interruptions, usual = [KeyboardInterrupt("first")], concurrent.futures.wait

    def wait(futures):
        if interruptions:
            raise interruptions.pop()
        return usual(futures)

    monkeypatch.setattr(concurrent.futures, "wait", wait)


def test_work_has_ended_when_the_wait_for_it_is_interrupted(interrupted_once):
    stopped, ended = threading.Event(), threading.Event()

    def work():
        stopped.wait(LONG)
        ended.set()

    with pytest.raises(KeyboardInterrupt, match="first"), Threads(1, stopped.set) as pool:
        running = pool.submit(work)
        waiting = pool.submit(pytest.fail, "began after the block")
        while not running.running():
            pass
    assert stopped.is_set() and ended.is_set()
    assert waiting.cancelled()


def test_an_error_in_the_block_waits_too():
    go, ended = threading.Event(), threading.Event()

    def work():
        go.wait(LONG)
        ended.set()

    with pytest.raises(OSError, match="full"), Threads(1) as pool:
        running = pool.submit(work)
        while not running.running():
            pass
        threading.Timer(0.01, go.set).start()
        raise OSError("full")
    assert ended.is_set()


def test_results_and_errors_come_through():
    with Threads(2) as pool:
        assert pool.submit(divmod, 7, 2).result() == (3, 1)
        with pytest.raises(ZeroDivisionError):
            pool.submit(divmod, 7, 0).result()


def test_what_is_interrupted_begins_again_and_the_first_signal_is_raised():
    calls = []

    def action():
        calls.append(len(calls))
        if len(calls) < 3:
            raise SystemExit(143) if len(calls) == 1 else KeyboardInterrupt

    with pytest.raises(SystemExit):
        uninterrupted(action)
    assert calls == [0, 1, 2]
    uninterrupted(action)
    assert len(calls) == 4
