"""Passing tensors around the ranks of a process group, after checking that all ranks make the same call."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_NO_SEND = (("cuda", "gloo"), ("xpu", "gloo"))  # gloo supports them in collectives only

Received = Callable[[], list[Tensor]]


class Ring(Protocol):
    """The ranks 0..size - 1 of a ring, from the point of view of one of them."""

    rank: int
    size: int

    def send(self, tensors: list[Tensor], hops: int = 1) -> Received:
        """Starts sending to rank + hops; calling the result waits for the tensors of rank - hops."""

    def gather(self, numbers: list[int], device: torch.device) -> list[list[int]]:
        """The numbers of every rank."""


class Alone:
    """The ring of one process."""

    rank, size = 0, 1

    def send(self, tensors: list[Tensor], hops: int = 1) -> Received:
        return lambda: tensors

    def gather(self, numbers: list[int], device: torch.device) -> list[list[int]]:
        return [numbers]


class ProcessRing:
    """The ranks of a `torch.distributed` group, by batched isend and irecv."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        # all ranks send the same messages in the same order, so that a tag is one message
        self._tags = itertools.count()

    def send(self, tensors: list[Tensor], hops: int = 1) -> Received:
        if hops % self.size == 0:
            return lambda: tensors
        to = dist.get_global_rank(self.group, (self.rank + hops) % self.size)
        source = dist.get_global_rank(self.group, (self.rank - hops) % self.size)
        # the closure keeps what is sent alive until it has arrived
        sent = [tensor.contiguous() for tensor in tensors]
        received = [torch.empty_like(tensor) for tensor in sent]
        tags = [next(self._tags) for _ in sent]
        calls = [dist.P2POp(dist.isend, x, to, self.group, tag) for x, tag in zip(sent, tags, strict=True)]
        calls += [dist.P2POp(dist.irecv, x, source, self.group, tag) for x, tag in zip(received, tags, strict=True)]
        works = dist.batch_isend_irecv(calls)

        def wait() -> list[Tensor]:
            for work in works:
                work.wait()
            sent.clear()
            return received

        return wait

    def gather(self, numbers: list[int], device: torch.device) -> list[list[int]]:
        mine = torch.tensor(numbers, dtype=torch.int64, device=device)
        table = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(table, mine, group=self.group)
        return torch.stack(table).tolist()


def devices_of(group: dist.ProcessGroup) -> tuple[str, ...]:
    """The device types whose tensors the group sends from rank to rank."""
    backends = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
    return tuple(device for device, backend in backends.items() if (device, backend) not in _NO_SEND)


def agree(
    ring: Ring, call: dict[str, int | float | None], problem: str | None, device: torch.device, own: int = 0
) -> list[int]:
    """Every rank's `own`; `ValueError` on every rank where their calls differ or one of them has a `problem`.

    Otherwise a rank that raises for its arguments would leave the others waiting.
    """
    table = ring.gather([problem is not None, *map(_as_int, call.values()), own], device)
    if problem is not None:
        raise ValueError(problem)
    failed = [rank for rank, row in enumerate(table) if row[0]]
    if failed:
        raise ValueError(f"ring: rank {failed[0]} of the ring refused its part of the call; its own error says why")
    for index, name in enumerate(call, start=1):
        other = next((rank for rank, row in enumerate(table) if row[index] != table[ring.rank][index]), None)
        if other is not None:
            raise ValueError(
                f"ring: the ranks must make the same call, but {name} differs between rank {ring.rank} "
                f"({_shown(call[name], table[ring.rank][index])}) and rank {other} "
                f"({_shown(call[name], table[other][index])}) of the ring"
            )
    return [row[-1] for row in table]


_NONE = -(2**63)


def _as_int(value: int | float | None) -> int:
    """A number as a 64-bit integer, different for different numbers."""
    if value is None:
        return _NONE
    if isinstance(value, float):
        return struct.unpack("<q", struct.pack("<d", value))[0]
    return int(value)


def _shown(like: int | float | None, bits: int) -> str:
    if bits == _NONE:
        return "None"
    return str(struct.unpack("<d", struct.pack("<q", bits))[0]) if isinstance(like, float) else str(bits)
