"""The checks of every executable before its backend runs anything: PJRT, for example, compares only sizes in bytes."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from easytorch.backends.arguments import sequence, truth
from easytorch.backends.errors import BackendError
from easytorch.backends.graph import Graph
from easytorch.backends.interface import Backend, Buffer, Executable
from easytorch.backends.partitioning import shard_shape
from easytorch.backends.shapes import Shape

# Held while buffers are compared and taken: of several threads that donate one buffer, one gets it.
TAKING = threading.RLock()


def local_shapes(graph: Graph) -> tuple[list[Shape], list[Shape]]:
    """The shapes of parameters and outputs on each device: of a partitioned graph those of its part."""
    inputs, outputs = list(graph.parameter_shapes), list(graph.output_shapes)
    if (mesh := graph.mesh) is None:
        return inputs, outputs
    return (
        [shard_shape(one, how, mesh) for one, how in zip(inputs, graph.parameter_shardings, strict=True)],
        [shard_shape(one, how, mesh) for one, how in zip(outputs, graph.output_shardings, strict=True)],
    )


class CheckedExecutable(Executable):
    """Inputs are counted and their shapes, devices and validity compared; `_take` and `_run` are the backend's."""

    def __init__(self, backend: Backend, graph: Graph, num_devices: int = 1) -> None:
        self._backend = backend
        self._name = graph.name
        self._num_devices = num_devices if graph.mesh is None else graph.mesh.size
        self._names = [op.node.attributes["name"] for op in graph.parameters]
        self._input_shapes, self._output_shapes = local_shapes(graph)
        self._finalized = False

    def inputs(self) -> tuple[list[str], list[Shape]]:
        """Names and shapes of the parameters."""
        return list(self._names), list(self._input_shapes)

    def outputs(self) -> list[Shape]:
        return list(self._output_shapes)

    def execute(self, inputs: Sequence[Buffer], donate: Sequence[bool] | None = None) -> list[Buffer]:
        """Checks, then runs."""
        self._require_open()
        given = sequence(inputs, f"{self._name!r}: inputs")
        count = len(self._names)
        if len(given) != count * self._num_devices:
            each = f" for each of {self._num_devices} devices" if self._num_devices > 1 else ""
            raise BackendError(f"{self._name!r} takes {count} inputs{each}, and {len(given)} were given")
        what = f"{self._name!r}: donate"
        donated = [False] * len(given) if donate is None else [truth(one, what) for one in sequence(donate, what)]
        if len(donated) != len(given):
            raise BackendError(f"{self._name!r}: donate has {len(donated)} entries for {len(given)} inputs")
        if any(donated):
            self._compare(given)
            self._prepare(donated)
        with TAKING:
            self._compare(given)
            self._refuse_donated_twice(given, donated)
            taken = self._take(given, donated)
        return self._run(taken)

    def _compare(self, inputs: Sequence[Buffer]) -> None:
        count = len(self._names)
        for number, buffer in enumerate(inputs):
            wanted, found = self._input_shapes[number % count], self._backend.buffer_shape(buffer)
            if found != wanted:
                name = self._names[number % count]
                raise BackendError(f"{self._name!r}: input {number} ({name!r}) is {wanted}, and {found} was given")
            device = self._backend.buffer_device_num(buffer)
            if device != number // count:
                raise BackendError(
                    f"{self._name!r}: input {number} is for device {number // count}, and is on device {device}"
                )

    def _require_open(self) -> None:
        if self._finalized:
            raise BackendError(f"{self._name!r} is finalized; compile it again")
        if self._backend.is_finalized():
            raise BackendError(f"{self._name!r}: its backend {self._backend.name!r} is finalized")

    def _refuse_donated_twice(self, inputs: Sequence[Buffer], donate: Sequence[bool]) -> None:
        """A donated buffer may be given once: its memory becomes an output's."""
        given: dict[int, int] = {}
        for buffer in inputs:
            given[id(buffer)] = given.get(id(buffer), 0) + 1
        for number, (buffer, donated) in enumerate(zip(inputs, donate, strict=True)):
            if donated and given[id(buffer)] > 1:
                raise BackendError(f"{self._name!r}: input {number} is donated, and given a second time")

    def _refuse_shared(self, number: int) -> None:
        raise BackendError(
            f"{self._name!r}: input {number} is a shared buffer: its memory stays its maker's, and is not donated"
        )

    def _prepare(self, donate: Sequence[bool]) -> None:
        """Slow preparation (compiling), done before the inputs are taken."""

    @abstractmethod
    def _take(self, inputs: Sequence[Buffer], donate: Sequence[bool]) -> Any:
        """Converts checked inputs for `_run`; donated buffers are invalid from here on, even if the run fails."""

    @abstractmethod
    def _run(self, taken: Any) -> list[Buffer]:
        """Runs on what `_take` gave."""

    def finalize(self) -> None:
        """Frees the program."""
        self._finalized = True
