from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import pytest

from easytorch.training import interrupt
from easytorch.training.interrupt import StopOnSignal


@pytest.fixture(autouse=True)
def dispositions():
    """Those of a shell's foreground process, whatever this one was started with (nohup and `&` ignore SIGINT)."""
    former = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for name, handler in former.items():
        signal.signal(name, handler)


@pytest.mark.parametrize("name", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_and_one_passed_on_at_once_is_the_same(name):
    before = signal.getsignal(name)
    with StopOnSignal() as stop:
        assert not stop.asked
        os.kill(os.getpid(), name)
        os.kill(os.getpid(), name)
        assert stop.asked
    assert signal.getsignal(name) is before


def test_a_later_one_interrupts(monkeypatch):
    monkeypatch.setattr(interrupt, "SAME_REQUEST_SECONDS", -1.0)
    with pytest.raises(KeyboardInterrupt), StopOnSignal():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_that_was_ignored_asks_too_and_is_ignored_again():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StopOnSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.asked
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_request_is_repeated_by_a_signal_later_than_one_passed_on(monkeypatch):
    """Three signals: at once, within the time that counts as the same request, and after it, counted from the first."""
    now = [100.0]
    monkeypatch.setattr(interrupt, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: None))
    with StopOnSignal() as stop:
        assert not stop.asked
        os.kill(os.getpid(), signal.SIGINT)
        now[0] = 101.5
        os.kill(os.getpid(), signal.SIGTERM)
        now[0] = 102.0
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.asked
        now[0] = 102.1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN, "restored once, by the signal, and not again"


def test_a_signal_is_waited_for_as_long_as_asked(monkeypatch):
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(interrupt, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    stop = StopOnSignal()
    assert stop.asked_within(1.0) is False and 1.0 <= now[0] < 1.2
    stop.asked = True
    assert stop.asked_within(5.0) is True and now[0] < 1.2
