"""The tensors of a model over a mesh as a checkpoint that is being read, by their names on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from easytorch.bridge.core.context_manager import ContextManager
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.dtypes import numpy_dtype, to_numpy
from easytorch.distributed.gathering import Gathering, Request, Rounds
from easytorch.protocol.saved_names import SavedNames

Take = Callable[[str], np.ndarray]


class HubReader(ContextManager):
    """A `Reader`. take: gives the elements of a tensor, and can be exchanged for another while the reader is open."""

    def __init__(self, infos: Mapping[str, TensorInfo], file: Path, take: Take) -> None:
        self.tensors: Mapping[str, TensorInfo] = infos
        self.metadata: Mapping[str, str] = {}
        self.files = (file,)
        self.take = take

    def read(self, name: str) -> np.ndarray:
        """The elements of one tensor, as `take` gives them."""
        return self.take(name)

    def close(self) -> None:
        """Nothing is open."""


class Recorded:
    """Gives zeros, and records what was asked for."""

    def __init__(self, infos: Mapping[str, TensorInfo]) -> None:
        self._infos = infos
        self.names: list[str] = []

    def __call__(self, name: str) -> np.ndarray:
        self.names.append(name)
        info = self._infos[name]
        return np.broadcast_to(np.zeros((), numpy_dtype(info.dtype)), info.shape)


class Everywhere:
    """Gives a full tensor in each rank: all of them ask for the same ones in the same order."""

    def __init__(self, names: SavedNames, gathering: Gathering) -> None:
        self._names, self._gathering = names, gathering

    def __call__(self, name: str) -> np.ndarray:
        sources = {one: self._gathering.everywhere(one) for one in self._names.sources(name)}
        return to_numpy(self._names.make(name, sources, ())[name].contiguous())


class InTurn:
    """Gives tensors in the order of `reads`, each gathered when it is asked for.

    What is split on disk is gathered once for all that are made of it, which are kept until they are read.
    """

    def __init__(self, reads: Sequence[str], names: SavedNames, rounds: Rounds) -> None:
        self._left, self._names, self._rounds = list(reversed(reads)), names, rounds
        self._kept = _Kept(reads, names)
        self._made: dict[str, Tensor] = {}

    def __call__(self, name: str) -> np.ndarray:
        assert self._left and self._left.pop() == name, f"{name} is read out of turn"
        wanted = self._kept.request(name)
        if wanted:
            tensors = self._rounds.next()
            self._made |= self._names.make(name, tensors, self._kept.names)
            del tensors
        found = self._made[name] if name in self._kept.names else self._made.pop(name)
        return to_numpy(found)


def requests(reads: Sequence[str], names: SavedNames) -> list[Request]:
    """What `InTurn` gathers for these reads, in order."""
    kept = _Kept(reads, names)
    return [wanted for name in reads if (wanted := kept.request(name))]


class _Kept:
    """Which tensors are there already when others are read."""

    def __init__(self, reads: Sequence[str], names: SavedNames) -> None:
        self._left, self._saved = Counter(reads), names
        self.names: set[str] = set()

    def request(self, name: str) -> Request:
        """What has to be gathered to read `name`, which is then read; () where it is there."""
        self._left[name] -= 1
        together = self._saved.made_with(name)
        wanted = () if name in self.names else self._saved.sources(name)
        if wanted and len(together) > 1:
            self.names |= {one for one in together if self._left[one] > 0}
        elif not self._left[name]:
            self.names.discard(name)
        return wanted
