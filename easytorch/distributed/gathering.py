"""Full tensors of what the ranks of a mesh hold in parts, each gathered by the rank that asks for it and no other.

Ranks ask in rounds: in each one every rank gets the tensors that it wants next, and sends the others its parts of
theirs. A rank never holds more than the tensors of its own request and its parts of the others'.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from easytorch.distributed.together import exchanged, rank_in, size_of, talking

# For each dimension the stretches of indices that a rank holds, in the order in which its part has them.
Box = tuple[tuple[tuple[int, int], ...], ...]
# Names of tensors that are wanted together.
Request = tuple[str, ...]


class OtherRankStoppedError(RuntimeError):
    """Another rank has stopped asking, because of an error of its own."""


@dataclass(frozen=True)
class Described:
    """A full tensor. tied: the first name of the weight; trainable: whether it is a parameter, not a buffer."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    tied: str
    trainable: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Gathering:
    """The tensors of all ranks of `group` by name, of which each rank passes those that it holds parts of.

    Names are in the order of the ranks: those of a pipeline's first stage come first. group: of a CPU backend; None for
    a process alone, which gets its own tensors without a copy. `ValueError` for a tensor that no ranks hold together.
    """

    def __init__(self, tensors: Mapping[str, Tensor], group: Any = None) -> None:
        self._tensors, self.group = tensors, group
        self.rank, self.ranks = rank_in(group), size_of(group)
        first: dict[int, str] = {}
        own = []
        for name, one in tensors.items():
            tied = first.setdefault(id(one), name)
            own.append((name, Described(tuple(one.shape), one.dtype, tied, isinstance(one, nn.Parameter)), box_of(one)))
        self.tensors: dict[str, Described] = {}
        self._holders: dict[str, dict[Box, list[int]]] = {}
        for rank, found in enumerate(exchanged(group, own)):
            for name, described, box in found:
                known = self.tensors.setdefault(name, described)
                if (known.shape, known.dtype) != (described.shape, described.dtype):
                    raise ValueError(f"{name} is {known}, and in rank {rank} {described}")
                self._holders.setdefault(name, {}).setdefault(box, []).append(rank)
        for name, boxes in self._holders.items():
            held = sum(_size(box) for box in boxes)
            if held != self.tensors[name].numel:
                raise ValueError(f"the ranks hold {held} of the {self.tensors[name].numel} values of {name}")

    def rounds(self, wanted: Sequence[Sequence[Request]]) -> Rounds:
        """wanted: each rank's requests in the order in which it makes them, the same in every rank."""
        return Rounds(self, wanted)

    def everywhere(self, name: str) -> Tensor:
        """One full tensor in each rank. All of them call this."""
        rounds = self.rounds([[(name,)]] * self.ranks)
        found = rounds.next()[name]
        rounds.finish()
        return found

    def exchange(self, requests: Sequence[Request], turn: int) -> dict[str, Tensor]:
        """One round: the tensors of this rank's request, on the CPU. requests: each rank's, in order."""
        full: dict[str, Tensor] = {}
        waiting: list[tuple[Any, Tensor, Tensor | None, Box]] = []
        sending: list[tuple[Any, Tensor]] = []
        with talking():
            for asking, names in enumerate(requests):
                for name, (box, holders) in self._parts(names):
                    source = asking if asking in holders else holders[(turn + asking) % len(holders)]
                    if self.rank == asking:
                        self._take(name, box, source, full, waiting)
                    elif self.rank == source and _size(box):
                        part = _bytes(self._local(name).contiguous())
                        sending.append((dist.isend(part, group=self.group, group_dst=asking), part))
            for work, part, target, box in waiting:
                work.wait()
                if target is not None:
                    _place(target, part, box)
            for work, _ in sending:
                work.wait()
        return full

    def _parts(self, names: Request) -> Iterator[tuple[str, tuple[Box, list[int]]]]:
        for name in names:
            for part in self._holders[name].items():
                yield name, part

    def _take(
        self,
        name: str,
        box: Box,
        source: int,
        full: dict[str, Tensor],
        waiting: list[tuple[Any, Tensor, Tensor | None, Box]],
    ) -> None:
        described = self.tensors[name]
        if source == self.rank and len(self._holders[name]) == 1:
            full[name] = self._local(name)
            return
        target = full.get(name)
        if target is None:
            target = full[name] = torch.empty(described.shape, dtype=described.dtype)
        if source == self.rank:
            _place(target, self._local(name), box)
            return
        if not _size(box):
            return
        rows = box[0][0] if box and len(box[0]) == 1 and _full(box[1:], described.shape[1:]) else None
        part = target if not box else target[slice(*rows)] if rows else torch.empty(_shape(box), dtype=described.dtype)
        work = dist.irecv(_bytes(part), group=self.group, group_src=source)
        waiting.append((work, part, None if rows or not box else target, box))

    def _local(self, name: str) -> Tensor:
        one = self._tensors[name].detach()
        return (one.to_local() if isinstance(one, DTensor) else one).cpu()


class Rounds:
    """The requests of all ranks under way. `finish` or `stop` is the last call in each rank."""

    def __init__(self, gathering: Gathering, wanted: Sequence[Sequence[Request]]) -> None:
        assert len(wanted) == gathering.ranks, "each rank has a list of requests"
        self._gathering, self._wanted = gathering, wanted
        self._turn, self._last = 0, max(map(len, wanted), default=0)

    def next(self) -> dict[str, Tensor]:
        """The tensors of this rank's next request. `OtherRankStoppedError` where a rank has called `stop`."""
        turn = self._turn
        self._flag(stopping=False)
        self._turn += 1
        requests = [own[turn] if turn < len(own) else () for own in self._wanted]
        return self._gathering.exchange(requests, turn)

    def finish(self) -> None:
        """Takes part in what the other ranks still want. `OtherRankStoppedError` as in `next`."""
        assert self._turn >= len(self._wanted[self._gathering.rank]), "a rank has not asked for all it wants"
        while self._turn < self._last:
            self.next()
        self._flag(stopping=False)

    def stop(self) -> None:
        """Tells the other ranks, at the beginning of their next round, that there is none."""
        self._flag(stopping=True)

    def _flag(self, *, stopping: bool) -> None:
        if self._gathering.group is None:
            return
        flag = torch.tensor(int(stopping))
        with talking():
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._gathering.group)
        if flag and not stopping:
            raise OtherRankStoppedError("another rank has stopped")


def box_of(tensor: Tensor) -> Box:
    """The stretches of the full tensor that this rank's part holds, by its placements."""
    if not isinstance(tensor, DTensor):
        return tuple(((0, size),) for size in tensor.shape)
    place = tensor.device_mesh.get_coordinate()
    if place is None:
        raise ValueError("this rank is not part of the mesh of one of its tensors")
    held = [torch.arange(size) for size in tensor.shape]
    for axis, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise ValueError("a tensor that has yet to be reduced over the mesh has no values")
        dim = getattr(placement, "dim", None)
        if dim is None:
            continue
        along: Any = _along(placement)
        parts, _ = along._split_tensor(held[dim], tensor.device_mesh.size(axis), with_padding=False, contiguous=False)
        held[dim] = parts[place[axis]]
    box = tuple(map(_stretches, held))
    local = tuple(tensor.to_local().shape)
    if _shape(box) != local and _size(box) + math.prod(local):
        raise ValueError(f"a part of {local} is held where the placements {tensor.placements} say {_shape(box)}")
    return box


def _along(placement: Any) -> Any:
    """The placement for one dimension alone."""
    factor = getattr(placement, "split_factor", None)
    return type(placement)(0) if factor is None else type(placement)(0, split_factor=factor)


def _stretches(indices: Tensor) -> tuple[tuple[int, int], ...]:
    if not indices.numel():
        return ()
    breaks = (torch.nonzero(indices.diff() != 1).flatten() + 1).tolist()
    edges = [0, *breaks, indices.numel()]
    return tuple((int(indices[start]), int(indices[end - 1]) + 1) for start, end in itertools.pairwise(edges))


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(sum(stop - start for start, stop in stretches) for stretches in box)


def _size(box: Box) -> int:
    return math.prod(_shape(box))


def _full(box: Box, shape: Sequence[int]) -> bool:
    return all(stretches == ((0, size),) for stretches, size in zip(box, shape, strict=True))


def _place(full: Tensor, part: Tensor, box: Box) -> None:
    """Copies a rank's part to where it belongs."""
    dims = []
    for stretches in box:
        ends = list(itertools.accumulate(stop - start for start, stop in stretches))
        here = [slice(end - stop + start, end) for (start, stop), end in zip(stretches, ends, strict=True)]
        dims.append([(slice(*there), own) for there, own in zip(stretches, here, strict=True)])
    for blocks in itertools.product(*dims):
        full[tuple(there for there, _ in blocks)].copy_(part[tuple(own for _, own in blocks)])


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor: backends do not know every dtype."""
    return tensor.view(-1).view(torch.uint8)
