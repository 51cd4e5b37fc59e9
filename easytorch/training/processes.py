"""The processes of a run: a single one, or those that torchrun started."""

from __future__ import annotations

import gc
import importlib
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, _set_pg_timeout, _world

from easytorch.distributed.mesh import release_groups
from easytorch.tpu_platform import find_device as find_tpu
from easytorch.tpu_platform import is_lazy, use_spmd
from easytorch.training.config import flag
from easytorch.training.interrupt import StopOnSignal

# torchrun polls its processes ten times a second; on a busy machine it takes longer to react.
LOST_PEER_SECONDS = 3.0
# When one process has waited too long for another, all that are alive have, give or take this.
SILENT_SECONDS = 5.0


class OtherProcessError(RuntimeError):
    """Another process of the run failed, and reports the reason. `wrong_input`: with a `ValueError` or an `OSError`."""

    def __init__(self, message: str, wrong_input: bool) -> None:
        self.wrong_input = wrong_input
        super().__init__(message)


class SilentProcessError(RuntimeError):
    """Another process has not answered for as long as the setting `timeout` allows."""


@dataclass
class Processes:
    """This process among `world` others, and the device it trains on.

    timeout: seconds that it waits for the others. doing: what it does, for the error where they do not answer.
    failed: all of them know that the run has.
    """

    rank: int
    world: int
    device: torch.device
    timeout: float = 1800.0
    doing: str = field(default="before the first step", init=False)
    failed: bool = field(default=False, init=False)
    mesh: Any = field(default=None, init=False)  # the DeviceMesh that `in_parallel` made of them
    _cpu_group: Any = field(default=None, init=False)

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def device_of_new_models(self) -> torch.device:
        """Where models are made; those for torch_xla on the CPU, from where each weight moves to its devices."""
        return torch.device("cpu") if is_lazy(self.device) else self.device

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def cpu_group(self) -> Any:
        """A group of all processes with a CPU backend for checkpoints, which threads may use beside the training's
        own; None for one process. Each process calls this."""
        if self.world > 1 and self._cpu_group is None:
            self._cpu_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout))
        return self._cpu_group

    def from_first(self, path: Path) -> Path:
        """The path that the first process gives."""
        found = [str(path)]
        if self.world > 1:
            dist.broadcast_object_list(found, src=0, group=self.cpu_group())
        return Path(found[0])

    def sum(self, *values: torch.Tensor | float) -> list[float]:
        """Each value summed over the processes; the same floats in every one."""
        stacked = torch.stack([torch.as_tensor(v, dtype=torch.float64, device="cpu").detach() for v in values])
        if self.world > 1:
            stacked = stacked.to(self.device)
            dist.all_reduce(stacked)
        return stacked.tolist()

    def merged(self, own: Mapping[str, float]) -> dict[str, float]:
        """The mappings of all processes as one; each process calls this."""
        found: list[Any] = [own] * self.world
        if self.world > 1:
            dist.all_gather_object(found, dict(own), group=self.cpu_group())
        return {name: value for one in found for name, value in one.items()}

    def any(self, found: bool) -> bool:
        """Whether `found` is true in any process; the same result in all."""
        return self.sum(float(found))[0] > 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """An error in the block in any process ends it in all: the first that failed raises its error, the others
        `OtherProcessError`. The block itself must not communicate."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:  # a boundary between processes: the others wait for this one's answer
            error = raised
        # By a sum that every process takes part in.
        marks = self.sum(*(_mark(error) if rank == self.rank else 0.0 for rank in range(self.world)))
        failed = [rank for rank, found in enumerate(marks) if found]
        if not failed:
            return
        self.failed = True
        if error is None or failed[0] != self.rank:
            raise OtherProcessError(
                f"process {failed[0]} of {self.world} has failed", wrong_input=marks[failed[0]] == 2.0
            ) from error
        raise error

    def limit_waiting(self) -> None:
        """Make every group of this process wait no longer than `timeout`; those of a mesh have torch's default."""
        for group in list(_world.pg_map) if self.world > 1 else ():
            _set_pg_timeout(timedelta(seconds=self.timeout), group)

    @contextmanager
    def one_failure(self, stop: StopOnSignal | None = None) -> Iterator[None]:
        """For a block that communicates: a process that fails in it breaks the connections of the others, which then
        raise `OtherProcessError`. The first to fail marks it in the shared store; if a process is killed, torchrun
        sends the others SIGTERM. If one does not answer in time, the first that has waited for it raises
        `SilentProcessError`."""
        try:
            yield
        except Exception as error:  # a boundary between processes
            if self.world == 1 or self.failed:
                raise
            mine = f"{self.rank} {_mark(error):.0f}"
            store = _get_default_store()
            store.set(f"easytorch/alive/{self.rank}", "1")
            rank, mark = store.compare_set("easytorch/failed", "", mine).decode().split()
            broken = isinstance(error, RuntimeError)
            waited = broken and any(one in str(error).lower() for one in _IN_VAIN)
            if rank == str(self.rank) and waited:
                raise SilentProcessError(self._waited_in_vain(self._silent(store))) from error
            killed = broken and stop is not None and stop.asked_within(LOST_PEER_SECONDS)
            if rank != str(self.rank) or killed:
                raise OtherProcessError("another process has failed", wrong_input=mark == "2") from error
            raise

    def _waited_in_vain(self, silent: list[int]) -> str:
        limit = f"{self.timeout:g} seconds ({flag('timeout')}), {self.doing}"
        if not silent:  # all are alive
            return f"another process, or the network, took longer than {limit}: give them more time"
        who = f"process{'es' if len(silent) > 1 else ''} {', '.join(map(str, silent))} of {self.world}"
        return f"{who} {'have' if len(silent) > 1 else 'has'} not answered for {limit}: it hangs, or its machine does"

    def _silent(self, store: dist.Store) -> list[int]:
        """The processes that have not failed, as this one has, and so have not come to where they would wait."""
        until = time.monotonic() + SILENT_SECONDS
        while True:
            silent = [rank for rank in range(self.world) if not store.check([f"easytorch/alive/{rank}"])]
            if not silent or time.monotonic() > until:
                return silent
            time.sleep(0.05)


# What gloo says when another process does not answer: of a sum and of a broadcast.
_IN_VAIN = ("timed out", "timeout caused")


def _of_this_start(store: dist.Store, world: int) -> dist.Store:
    """The store of torchrun, without what the processes that it has restarted left there.

    torchrun (2.13) keeps one store over its restarts: a process that was quicker than the first connected to the
    address of one that had been killed, and the key of the failure before hid the next. Restarts are counted per node,
    so several nodes share the store as torch does; TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 makes a new one for each start.
    """
    if os.environ.get("LOCAL_WORLD_SIZE") != str(world):
        return store
    return dist.PrefixStore(f"easytorch/start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _mark(error: Exception | None) -> float:
    """0 without an error, 2 for wrong input, else 1."""
    return 0.0 if error is None else 2.0 if isinstance(error, (ValueError, OSError)) else 1.0


def find_device(device: str) -> torch.device:
    """The device this process trains on. `ValueError` for a GPU that is not there."""
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if kind == "cpu":
        return torch.device("cpu")
    if kind == "xla":
        return find_tpu("xla")
    if not torch.cuda.is_available():
        raise ValueError(
            f"{flag('device')} cuda: torch sees no GPU here; use --device cpu, or install a CUDA or ROCm torch"
        )
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


@contextmanager
def joined(device: torch.device, timeout: float = 1800.0) -> Iterator[Processes]:
    """Join the processes torchrun started (gloo on CPU, nccl on GPU); without torchrun there is only this one.

    timeout: seconds that a process waits for the others, once all of them have joined.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if is_lazy(device):
        use_spmd()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        # torch.optim and DistributedDataParallel import torch._dynamo, and a process group that exists by then stays
        # alive past destroy_process_group. Gloo's threads then outlive the run, and one that drops a tensor while
        # Python shuts down aborts the process: seen in 1 of 40 short runs on a loaded machine, torch 2.13.
        importlib.import_module("torch._dynamo")
        on_gpu = device.type == "cuda"
        store, rank, world = next(dist.rendezvous("env://", timeout=dist.default_pg_timeout))
        dist.init_process_group(
            "nccl" if on_gpu else "gloo", store=_of_this_start(store, world), rank=rank, world_size=world,
            device_id=device if on_gpu else None,
        )  # fmt: skip
    processes = Processes(int(os.environ.get("RANK", "0")), world, device, timeout)
    processes.limit_waiting()  # not before: a process may need long to start
    try:
        yield processes
    finally:
        if world > 1:
            dist.destroy_process_group()
            release_groups(processes.mesh)
            # DistributedDataParallel and its model refer to each other, and it holds the group
            gc.collect()
