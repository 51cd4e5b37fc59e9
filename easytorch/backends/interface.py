"""The interface of a backend: it holds buffers, makes builders, and runs what they compile (GoMLX's `backends`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from easytorch.backends.shapes import Shape
from easytorch.backends.types import Capabilities, DeviceNum

if TYPE_CHECKING:
    import torch

    from easytorch.backends.builder import Builder
    from easytorch.backends.graph import Graph

# An array on a device, opaque outside of its backend.
Buffer = Any


class DataInterface(ABC):
    """Arrays to and from the devices of a backend. A finalized or donated buffer is a `BackendError` everywhere."""

    @abstractmethod
    def buffer_finalize(self, buffer: Buffer) -> None:
        """Frees the buffer now."""

    @abstractmethod
    def buffer_shape(self, buffer: Buffer) -> Shape:
        """The shape of the array in `buffer`."""

    @abstractmethod
    def buffer_device_num(self, buffer: Buffer) -> DeviceNum:
        """The number of the device that holds `buffer`."""

    @abstractmethod
    def buffer_to_flat_data(self, buffer: Buffer, flat: np.ndarray) -> None:
        """Copies the elements, in C order, into the one-dimensional array `flat` of their type and number."""

    @abstractmethod
    def buffer_from_flat_data(self, device_num: int, flat: Any, shape: Shape) -> Buffer:
        """A buffer of `shape` with a copy of the elements of the one-dimensional `flat`."""

    @abstractmethod
    def has_shared_buffers(self) -> bool:
        """Whether buffers can be memory that the caller reads and writes too."""

    @abstractmethod
    def new_shared_buffer(self, device_num: int, shape: Shape) -> tuple[Buffer, np.ndarray]:
        """A buffer, and its elements as a one-dimensional array over the same memory."""

    @abstractmethod
    def buffer_data(self, buffer: Buffer) -> np.ndarray:
        """The elements of a buffer as a one-dimensional array over the same memory, where they are shared."""

    @abstractmethod
    def buffer_from_numpy(self, array: np.ndarray, device_num: int = 0) -> Buffer:
        """A buffer with the elements of `array`: over its memory where the backend can; then it must not be changed."""

    @abstractmethod
    def buffer_to_numpy(self, buffer: Buffer) -> np.ndarray:
        """The elements as an array, over the same memory where the backend can; it may be read only."""

    @abstractmethod
    def buffer_from_torch(self, tensor: torch.Tensor, device_num: int = 0) -> Buffer:
        """The same of a torch tensor (DLPack, without a copy where the layout allows)."""

    @abstractmethod
    def buffer_to_torch(self, buffer: Buffer) -> torch.Tensor:
        """`buffer_to_numpy`, as a torch tensor."""


class Backend(DataInterface):
    """A way to run computations. After `finalize` everything but `is_finalized` is a `BackendError`."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name it is registered under."""

    @property
    @abstractmethod
    def description(self) -> str:
        """A line for people: what it is, on what it runs, of what version."""

    @abstractmethod
    def num_devices(self) -> int:
        """How many devices there are."""

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """The operations it has, for which element types; derived from its code."""

    @abstractmethod
    def builder(self, name: str, num_devices: int = 1) -> Builder:
        """A new computation. num_devices: on how many it will run at once, each with its own inputs."""

    def partitions(self) -> bool:
        """Whether it divides a computation over a mesh of devices (`Builder.distributed_auto_sharding`)."""
        return False

    @abstractmethod
    def compile_graph(self, graph: Graph, num_devices: int) -> Executable:
        """Compiles a finished graph; called by `Builder.compile`."""

    @abstractmethod
    def finalize(self) -> None:
        """Frees everything."""

    @abstractmethod
    def is_finalized(self) -> bool:
        """Whether `finalize` was called."""

    def __str__(self) -> str:
        return self.name


class Executable(ABC):
    """A compiled computation."""

    @abstractmethod
    def inputs(self) -> tuple[list[str], list[Shape]]:
        """Names and shapes of the parameters, in the order they were made."""

    @abstractmethod
    def outputs(self) -> list[Shape]:
        """Shapes of the outputs, in the order given to `Builder.compile`."""

    @abstractmethod
    def execute(self, inputs: Sequence[Buffer], donate: Sequence[bool] | None = None) -> list[Buffer]:
        """Runs on device 0, or on all it was built for: then inputs and outputs are those of device 0, then 1, ...

        Buffers marked in `donate` are invalid afterwards, and their memory may become an output's.
        """

    @abstractmethod
    def finalize(self) -> None:
        """Frees the program; executing it afterwards is a `BackendError`."""
