"""A plan applied to an open checkpoint: the same weights under other names, still read one tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

import numpy as np

from easytorch.bridge.bits import identical
from easytorch.bridge.formats.base import Reader, TensorInfo
from easytorch.bridge.plan import Plan, Same, Step


class PlannedReader:
    """The targets of `plan` as a checkpoint of its own, so that conversions can be chained.

    Sources are read from `reader`, those it does not have from `beside`. It owns neither.
    """

    def __init__(self, reader: Reader, plan: Plan, beside: Reader | None = None) -> None:
        self.tensors: Mapping[str, TensorInfo] = plan.targets
        self.metadata: Mapping[str, str] = {}
        self.files = reader.files
        self._home = {} if beside is None else dict.fromkeys(beside.tensors, beside)
        self._home |= dict.fromkeys(reader.tensors, reader)
        self._makers = {info.name: (step, place) for step in plan.steps for place, info in enumerate(step.targets)}

    def read(self, name: str) -> np.ndarray:
        """The data of one tensor: a view of the source's where the layout allows."""
        step, place = self._makers[name]
        return step.run([self._home[source].read(source) for source in step.sources])[place]

    def close(self) -> None:
        """Nothing: the readers behind it are closed by whoever opened them."""

    def __enter__(self) -> PlannedReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def same_data(reader: Reader) -> Same:
    """Whether two steps over `reader` make bit-identical tensors."""

    def same(one: Step, other: Step) -> bool:
        first, second = one.targets[0], other.targets[0]
        if first.shape != second.shape or first.dtype != second.dtype:
            return False
        arrays = (step.run([reader.read(name) for name in step.sources])[0] for step in (one, other))
        return identical(*arrays)

    return same
