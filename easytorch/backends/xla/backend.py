"""The backend `xla`: PJRT's devices of one platform.

Configurations: `xla` (jax's default platform), `xla:cpu`, `xla:cuda`, `xla:rocm`, `xla:tpu`; and `xla:jit`,
`xla:jit:cpu`, ...: the same modules by `jax.jit`, should jaxlib change what pjrt.py knows of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from easytorch.backends.builder import Builder
from easytorch.backends.dtypes import dtype_of
from easytorch.backends.errors import BackendError
from easytorch.backends.graph import Graph
from easytorch.backends.interface import Backend, Buffer, Executable
from easytorch.backends.registry import register
from easytorch.backends.shapes import Shape
from easytorch.backends.types import Capabilities, DeviceNum
from easytorch.backends.xla import pjrt
from easytorch.backends.xla.buffers import XlaBuffer, aligned_zeros, spec, valid
from easytorch.backends.xla.program import JitExecutable, XlaExecutable
from easytorch.backends.xla.stablehlo import CAPABILITIES

if TYPE_CHECKING:
    import torch


class XlaBackend(Backend):
    """Devices of one platform, and the arrays on them, which are jax arrays."""

    def __init__(self, config: str = "") -> None:
        first, _, rest = config.partition(":")
        self._jit = first == "jit"
        self.devices: list[Any] = pjrt.devices(rest if self._jit else config)
        self._finalized = False

    @property
    def name(self) -> str:
        """The name it is registered under."""
        return "xla"

    @property
    def description(self) -> str:
        """Platform, devices and version."""
        device = self.devices[0]
        by = "jax.jit" if self._jit else "PJRT"
        return f"XLA on {len(self.devices)} x {device.device_kind} ({device.platform}) by {by} of jaxlib {pjrt.VERSION}"

    def num_devices(self) -> int:
        """How many this process has."""
        self._require_open()
        return len(self.devices)

    def capabilities(self) -> Capabilities:
        """What the emitters write."""
        return CAPABILITIES

    def builder(self, name: str, num_devices: int = 1) -> Builder:
        """A new computation."""
        self._require_open()
        if not 1 <= num_devices <= len(self.devices):
            raise BackendError(f"{name!r} is to run on {num_devices} devices, there are {len(self.devices)}")
        return Builder(self, name, num_devices)

    def compile_graph(self, graph: Graph, num_devices: int) -> Executable:
        """The graph as StableHLO, compiled, or loaded from the cache."""
        self._require_open()
        return (JitExecutable if self._jit else XlaExecutable)(self, graph, num_devices)

    def finalize(self) -> None:
        """Lets go of the client, which is jax's; buffers free their memory when nothing refers to them."""
        self._finalized = True

    def is_finalized(self) -> bool:
        """Whether `finalize` was called."""
        return self._finalized

    def buffer_finalize(self, buffer: Buffer) -> None:
        """Frees the memory, unless a numpy or torch array is over it."""
        self._buffer(buffer).release("finalized")

    def buffer_shape(self, buffer: Buffer) -> Shape:
        """Its shape."""
        return self._spec(buffer)[0]

    def buffer_device_num(self, buffer: Buffer) -> DeviceNum:
        """The device it is on."""
        return DeviceNum(self._spec(buffer)[1])

    def buffer_to_flat_data(self, buffer: Buffer, flat: np.ndarray) -> None:
        """Copies the elements out."""
        shape = self.buffer_shape(buffer)
        if flat.dtype != shape.dtype.numpy or flat.shape != (shape.size,):
            raise BackendError(f"{shape.size} elements of {shape.dtype} do not go into {flat.dtype}{list(flat.shape)}")
        flat[:] = self.buffer_to_numpy(buffer).reshape(-1)

    def buffer_from_flat_data(self, device_num: int, flat: Any, shape: Shape) -> Buffer:
        """Copies the elements in."""
        array = np.asarray(flat)
        if array.dtype != shape.dtype.numpy or array.shape != (shape.size,):
            raise BackendError(
                f"{array.dtype}{list(array.shape)} is not the {shape.size} elements of {shape.dtype} of {shape}"
            )
        return self._put(array.reshape(shape.dimensions), device_num, copy=True)

    def has_shared_buffers(self) -> bool:
        """On a CPU."""
        return self.devices[0].platform == "cpu"

    def new_shared_buffer(self, device_num: int, shape: Shape) -> tuple[Buffer, np.ndarray]:
        """A buffer over memory of numpy."""
        if not self.has_shared_buffers():
            raise BackendError(f"the memory of {self.devices[0].device_kind} is not shared; use buffer_from_numpy")
        if shape.dtype.bits < 8:
            raise BackendError(f"XLA packs {shape.dtype}, numpy does not: they share none; use buffer_from_numpy")
        array = aligned_zeros(shape)
        buffer = self._put(array, device_num)
        buffer.shared = array.reshape(-1)
        return buffer, buffer.shared

    def buffer_data(self, buffer: Buffer) -> np.ndarray:
        """The elements over the same memory: writable for shared buffers, read only for others, which may be
        constants or other people's arrays."""
        found = self._buffer(buffer)
        if not self.has_shared_buffers():
            raise BackendError(f"the memory of {self.devices[0].device_kind} is not shared; use buffer_to_numpy")
        return self.buffer_to_numpy(found).reshape(-1) if found.shared is None else found.shared

    def buffer_from_numpy(self, array: np.ndarray, device_num: int = 0) -> Buffer:
        """Over the same memory on a CPU if it is contiguous and aligned to 64 bytes; else a copy."""
        return self._put(np.asarray(array), device_num)

    def buffer_to_numpy(self, buffer: Buffer) -> np.ndarray:
        """The elements, read only; on a CPU over the same memory."""
        return np.asarray(self._buffer(buffer).array)

    def buffer_from_torch(self, tensor: torch.Tensor, device_num: int = 0) -> Buffer:
        """By DLPack."""
        from easytorch.backends.xla.torch_exchange import from_torch

        self._require_open()
        array, shape = from_torch(tensor, self._device(device_num))
        return XlaBuffer(array, spec(shape, device_num))

    def buffer_to_torch(self, buffer: Buffer) -> torch.Tensor:
        """By DLPack."""
        from easytorch.backends.xla.torch_exchange import to_torch

        found = self._buffer(buffer)
        return to_torch(found.array, self.buffer_shape(found))

    def _put(self, array: np.ndarray, device_num: int, *, copy: bool = False) -> XlaBuffer:
        self._require_open()
        shape = Shape(dtype_of(array.dtype), array.shape)
        return XlaBuffer(pjrt.put(array, self._device(device_num), copy=copy), spec(shape, device_num))

    def _device(self, device_num: int) -> Any:
        if not 0 <= device_num < len(self.devices):
            raise BackendError(f"there is no device {device_num}; there are {len(self.devices)}")
        return self.devices[device_num]

    def _spec(self, buffer: Buffer) -> tuple[Shape, int]:
        found = self._buffer(buffer).spec
        assert found is not None
        return found

    def _buffer(self, buffer: Buffer) -> XlaBuffer:
        self._require_open()
        return valid(buffer)

    def _require_open(self) -> None:
        if self._finalized:
            raise BackendError("the backend 'xla' is finalized; make a new one")


register("xla", XlaBackend)
