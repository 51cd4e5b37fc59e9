"""Of several processes that fail, one speaks: without torchrun, with the store and the sum that they would share."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist

from easytorch.training import processes as module
from easytorch.training.interrupt import StopOnSignal
from easytorch.training.processes import OtherProcessError, Processes, SilentProcessError, _of_this_start


class Store(dict):
    def compare_set(self, key, expected, desired):
        if self.get(key, "") == expected:
            self[key] = desired
        return self[key].encode()

    def set(self, key, value):
        self[key] = value

    def check(self, keys):
        return all(key in self for key in keys)


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.setattr(module, "LOST_PEER_SECONDS", 0.0)
    store = Store()
    monkeypatch.setattr(module, "_get_default_store", lambda: store)
    return [Processes(rank, 2, torch.device("cpu")) for rank in range(2)]


def fails(processes, error, *, stop=None):
    with pytest.raises(Exception) as caught, processes.one_failure(stop or StopOnSignal()):
        raise error
    return caught.value


@pytest.mark.parametrize(
    ("error", "wrong_input"), [(RuntimeError("out of memory"), False), (OSError("full"), True), (KeyError("k"), False)]
)
def test_the_first_to_fail_speaks_and_the_others_have_its_exit_code(ranks, error, wrong_input):
    assert fails(ranks[1], error) is error
    other = fails(ranks[0], RuntimeError("Connection closed by peer"))
    assert isinstance(other, OtherProcessError) and other.wrong_input is wrong_input


def test_a_process_that_does_not_answer_is_named_by_the_first_that_has_waited(ranks, monkeypatch):
    monkeypatch.setattr(module, "SILENT_SECONDS", 0.0)
    waited = RuntimeError("[tcp/unbound_buffer.cc:78] Timed out waiting 7000ms for recv operation to complete")
    ranks[0].doing, ranks[0].timeout = "in step 5", 7.0
    found = fails(ranks[0], waited)
    assert isinstance(found, SilentProcessError)
    assert str(found).startswith("process 1 of 2 has not answered for 7 seconds (timeout (--timeout)), in step 5: ")
    assert isinstance(fails(ranks[1], waited), OtherProcessError), "it was alive after all, and late"
    module._get_default_store().pop("easytorch/failed")
    late = fails(ranks[1], waited)
    assert isinstance(late, SilentProcessError) and "or the network, took longer than 1800 seconds" in str(late)


def test_a_connection_that_a_killed_process_broke_is_not_told(ranks):
    former = signal.getsignal(signal.SIGTERM)
    with StopOnSignal() as stop:
        os.kill(os.getpid(), signal.SIGTERM)  # as torchrun does to those that are left
        assert isinstance(fails(ranks[0], RuntimeError("Connection closed"), stop=stop), OtherProcessError)
    assert signal.getsignal(signal.SIGTERM) is former


def test_what_is_no_broken_connection_is_told_though_a_signal_came(ranks):
    with StopOnSignal() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        error = ValueError("wrong")
        assert fails(ranks[0], error, stop=stop) is error


def test_one_process_alone_and_one_whose_failure_all_know_raise_as_they_are(ranks):
    error = RuntimeError("x")
    assert fails(Processes(0, 1, torch.device("cpu")), error) is error
    ranks[0].failed = True
    assert fails(ranks[0], error) is error


def test_a_restart_by_torchrun_sees_no_key_of_the_start_before(monkeypatch):
    """torchrun keeps its store; the address of a killed process in it is where the next would connect to."""
    shared = dist.HashStore()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    _of_this_start(shared, 2).set("easytorch/failed", "1 1")
    assert _of_this_start(shared, 2).check(["easytorch/failed"])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not _of_this_start(shared, 2).check(["easytorch/failed"])
    assert _of_this_start(shared, 4) is shared, "nodes count their restarts apart"
