"""A plan applied to an open checkpoint: the same weights under other names, still read one tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock

import numpy as np

from easytorch.bridge.core.boxes import Box, read_box
from easytorch.bridge.core.casting import CastOverflow
from easytorch.bridge.core.compare import identical_parts
from easytorch.bridge.core.context_manager import ContextManager
from easytorch.bridge.core.in_parts import InParts, read_in_parts
from easytorch.bridge.core.reader import Reader
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.dtypes import numpy_dtype
from easytorch.bridge.rules.plan import Plan, Same, Step
from easytorch.bridge.rules.transforms import get_transform
from easytorch.bridge.storage.temp_arrays import TempArrays


class PlannedReader(ContextManager):
    """The targets of `plan` as a checkpoint of its own, so that conversions can be chained.

    Sources are read from `reader`, those it does not have from `beside`. It owns neither. The tensors of a leaf that
    holds several (stacked layers) are all made when the first is read; the others wait in `temp_arrays`.
    """

    def __init__(
        self, reader: Reader, plan: Plan, beside: Reader | None = None, temp_arrays: TempArrays | None = None
    ) -> None:
        self.tensors: Mapping[str, TensorInfo] = plan.targets
        self.metadata: Mapping[str, str] = {}
        self.files = reader.files
        self._home = {} if beside is None else dict.fromkeys(beside.tensors, beside)
        self._home |= dict.fromkeys(reader.tensors, reader)
        self._makers = {info.name: step for step in plan.steps for info in step.targets}
        self._temp_arrays = TempArrays() if temp_arrays is None else temp_arrays
        self._aside: dict[str, np.ndarray] = {}
        self._locks = {step.sources: Lock() for step in plan.steps if len(step.targets) > 1}

    def step(self, name: str) -> Step:
        """The step that computes the tensor `name`."""
        return self._makers[name]

    def read(self, name: str) -> np.ndarray:
        """The data of one tensor: a view of the source's where the layout allows."""
        try:
            return self.read_in_parts(name).whole()
        except CastOverflow as error:
            raise error.of(name) from None

    def read_in_parts(self, name: str) -> InParts:
        """The same, without copying stacked parts together and without casting yet."""
        step = self._makers[name]
        if len(step.targets) == 1:
            return self._run(step)[0]
        with self._locks[step.sources]:
            if name not in self._aside:
                for info, made in zip(step.targets, self._run(step), strict=True):
                    self._aside[info.name] = self._temp_arrays.put_aside(made.whole())
            return InParts.of(self._aside.pop(name))

    def read_box(self, name: str, box: Box) -> np.ndarray:
        """A box of one tensor: without the rest of its source where the layout allows, and the source's reader."""
        step = self._makers[name]
        box_of = step.transform.box_of
        if len(step.sources) > 1 or box_of is None or not (step.reverse or step.transform is get_transform("identity")):
            return self.read(name)[box]
        (source,) = step.sources
        home = self._home[source]
        number = next(place for place, target in enumerate(step.targets) if target.name == name)
        inner, made = box_of(number, box, home.tensors[source].shape)
        part = InParts.of(made(read_box(home, source, inner)))
        try:
            return part.cast(numpy_dtype(self.tensors[name].dtype)).whole()
        except CastOverflow as error:
            raise error.of(name) from None

    def _run(self, step: Step) -> Sequence[InParts]:
        return step.run_in_parts([read_in_parts(self._home[source], source) for source in step.sources])

    def close(self) -> None:
        """Drops the temporary arrays; the underlying readers are closed by whoever opened them."""
        self._aside.clear()


def same_data(reader: Reader) -> Same:
    """Whether two steps over `reader` make bit-identical tensors."""

    def same(one: Step, other: Step) -> bool:
        first, second = one.targets[0], other.targets[0]
        if first.shape != second.shape or first.dtype != second.dtype:
            return False
        made = (step.run_in_parts([read_in_parts(reader, name) for name in step.sources])[0] for step in (one, other))
        return identical_parts(*made)

    return same
