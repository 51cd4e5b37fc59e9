"""The processes of a run: one alone, or those that torchrun started."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Processes:
    """This process among `world` others, and the device it trains on."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def sum(self, *values: torch.Tensor | float) -> list[float]:
        """Each value summed over the processes; the same floats in every one."""
        stacked = torch.stack([torch.as_tensor(v, dtype=torch.float64, device="cpu").detach() for v in values])
        if self.world > 1:
            stacked = stacked.to(self.device)
            dist.all_reduce(stacked)
        return stacked.tolist()


@contextmanager
def joined(device: str) -> Iterator[Processes]:
    """Join the processes torchrun started (gloo on CPU, nccl on GPU); without torchrun there is only this one."""
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    local = torch.device("cpu")
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("device cuda: torch sees no GPU here; use device cpu, or install a CUDA or ROCm torch")
        local = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(local)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        # torch.optim and DistributedDataParallel import torch._dynamo, and a process group that exists by then stays
        # alive past destroy_process_group. Gloo's threads then outlive the run, and one that drops a tensor while
        # Python shuts down aborts the process: seen in 1 of 40 short runs on a loaded machine, torch 2.13.
        importlib.import_module("torch._dynamo")
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", device_id=local if kind == "cuda" else None)
    try:
        yield Processes(int(os.environ.get("RANK", "0")), world, local)
    finally:
        if world > 1:
            dist.destroy_process_group()
