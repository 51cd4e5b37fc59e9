"""A backend without any operations: each, and every transfer, is an `OpNotImplementedError`.

A new backend starts as a subclass and states, in `capabilities`, the operations it has; the builder refuses the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from easytorch.backends.builder import Builder
from easytorch.backends.errors import OpNotImplementedError
from easytorch.backends.graph import Graph
from easytorch.backends.interface import Backend, Buffer, Executable
from easytorch.backends.registry import register
from easytorch.backends.shapes import Shape
from easytorch.backends.types import Capabilities, DeviceNum

if TYPE_CHECKING:
    import torch


class NotImplementedBackend(Backend):
    """Methods that are not overridden are not implemented."""

    def __init__(self, config: str = "") -> None:
        self._finalized = False

    @property
    def name(self) -> str:
        """The name it is registered under."""
        return "notimplemented"

    @property
    def description(self) -> str:
        return "implements nothing: the base of new backends"

    def num_devices(self) -> int:
        """One, so that a builder can be made."""
        return 1

    def capabilities(self) -> Capabilities:
        return Capabilities()

    def builder(self, name: str, num_devices: int = 1) -> Builder:
        """A builder that takes what `capabilities` says."""
        return Builder(self, name, num_devices)

    def compile_graph(self, graph: Graph, num_devices: int) -> Executable:
        self._refuse("Compile")

    def finalize(self) -> None:
        """Frees nothing."""
        self._finalized = True

    def is_finalized(self) -> bool:
        """Whether `finalize` was called."""
        return self._finalized

    def buffer_finalize(self, buffer: Buffer) -> None:
        self._refuse("BufferFinalize")

    def buffer_shape(self, buffer: Buffer) -> Shape:
        self._refuse("BufferShape")

    def buffer_device_num(self, buffer: Buffer) -> DeviceNum:
        self._refuse("BufferDeviceNum")

    def buffer_to_flat_data(self, buffer: Buffer, flat: np.ndarray) -> None:
        self._refuse("BufferToFlatData")

    def buffer_from_flat_data(self, device_num: int, flat: Any, shape: Shape) -> Buffer:
        self._refuse("BufferFromFlatData")

    def has_shared_buffers(self) -> bool:
        return False

    def new_shared_buffer(self, device_num: int, shape: Shape) -> tuple[Buffer, np.ndarray]:
        self._refuse("NewSharedBuffer")

    def buffer_data(self, buffer: Buffer) -> np.ndarray:
        self._refuse("BufferData")

    def buffer_from_numpy(self, array: np.ndarray, device_num: int = 0) -> Buffer:
        self._refuse("BufferFromNumpy")

    def buffer_to_numpy(self, buffer: Buffer) -> np.ndarray:
        self._refuse("BufferToNumpy")

    def buffer_from_torch(self, tensor: torch.Tensor, device_num: int = 0) -> Buffer:
        self._refuse("BufferFromTorch")

    def buffer_to_torch(self, buffer: Buffer) -> torch.Tensor:
        self._refuse("BufferToTorch")

    def _refuse(self, what: str) -> NoReturn:
        raise OpNotImplementedError(f"{what}: not implemented by the backend {self.name!r}")


register("notimplemented", NotImplementedBackend)
