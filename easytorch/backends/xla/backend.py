"""The backend `xla`: PJRT's devices of one platform.

Configurations: `xla` (jax's default platform), `xla:cpu`, `xla:cuda`, `xla:rocm`, `xla:tpu`; and `xla:jit`,
`xla:jit:cpu`, ...: the same modules by `jax.jit`, should jaxlib change what pjrt.py knows of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from easytorch.backends.arguments import text
from easytorch.backends.builder import Builder
from easytorch.backends.dtypes import array_of
from easytorch.backends.errors import BackendError
from easytorch.backends.executable import TAKING
from easytorch.backends.flat import device_count, device_number, flat_source, flat_target, tensor_of
from easytorch.backends.graph import Graph
from easytorch.backends.interface import Backend, Buffer, Executable
from easytorch.backends.registry import register
from easytorch.backends.shapes import Shape, make_shape, shape_of
from easytorch.backends.types import Capabilities, DeviceNum
from easytorch.backends.xla import pjrt
from easytorch.backends.xla.buffers import XlaBuffer, aligned_zeros, gone, spec, valid
from easytorch.backends.xla.program import JitExecutable, XlaExecutable
from easytorch.backends.xla.stablehlo import CAPABILITIES

if TYPE_CHECKING:
    import torch


class XlaBackend(Backend):
    """Devices of one platform, and the arrays on them, which are jax arrays."""

    def __init__(self, config: str = "") -> None:
        first, _, rest = text(config, "the configuration").partition(":")
        self._jit = first == "jit"
        self.devices: list[Any] = pjrt.devices(rest if self._jit else config)
        self._finalized = False

    @property
    def name(self) -> str:
        return "xla"

    @property
    def description(self) -> str:
        device = self.devices[0]
        by = "jax.jit" if self._jit else "PJRT"
        return f"XLA on {len(self.devices)} x {device.device_kind} ({device.platform}) by {by} of jaxlib {pjrt.VERSION}"

    def num_devices(self) -> int:
        self._require_open()
        return len(self.devices)

    def capabilities(self) -> Capabilities:
        """Every operation that has an emitter."""
        return CAPABILITIES

    def builder(self, name: str, num_devices: int = 1) -> Builder:
        self._require_open()
        return Builder(self, name, device_count(num_devices, len(self.devices), self.name))

    def partitions(self) -> bool:
        """By PJRT; `xla:jit` runs on one device."""
        return not self._jit

    def compile_graph(self, graph: Graph, num_devices: int) -> Executable:
        """The graph as StableHLO, compiled, or loaded from the cache."""
        self._require_open()
        return (JitExecutable if self._jit else XlaExecutable)(self, graph, num_devices)

    def finalize(self) -> None:
        """Releases the client, which is jax's; buffers free their memory when nothing refers to them."""
        self._finalized = True

    def is_finalized(self) -> bool:
        return self._finalized

    def buffer_finalize(self, buffer: Buffer) -> None:
        """Frees the memory, unless a numpy array or torch tensor shares it."""
        with TAKING:
            self._buffer(buffer).release("finalized")

    def buffer_shape(self, buffer: Buffer) -> Shape:
        return self._spec(buffer)[0]

    def buffer_device_num(self, buffer: Buffer) -> DeviceNum:
        return DeviceNum(self._spec(buffer)[1])

    def buffer_to_flat_data(self, buffer: Buffer, flat: np.ndarray) -> None:
        """Copies the elements into `flat`."""
        flat_target(flat, self.buffer_shape(buffer))[:] = self.buffer_to_numpy(buffer).reshape(-1)

    def buffer_from_flat_data(self, device_num: int, flat: Any, shape: Shape) -> Buffer:
        """A buffer with a copy of `flat`."""
        return self._put(flat_source(flat, shape), device_num, copy=True)

    def has_shared_buffers(self) -> bool:
        """True on a CPU."""
        platform: str = self.devices[0].platform
        return platform == "cpu"

    def new_shared_buffer(self, device_num: int, shape: Shape) -> tuple[Buffer, np.ndarray]:
        """A buffer of zeros in numpy's memory, and its elements."""
        if not self.has_shared_buffers():
            raise BackendError(f"the memory of {self.devices[0].device_kind} is not shared; use buffer_from_numpy")
        if shape_of(shape, "NewSharedBuffer: shape").dtype.bits < 8:
            raise BackendError(f"XLA packs {shape.dtype}, numpy does not: they share none; use buffer_from_numpy")
        array = aligned_zeros(shape)
        buffer = self._put(array, device_num)
        buffer.shared = array.reshape(-1)
        return buffer, buffer.shared

    def buffer_data(self, buffer: Buffer) -> np.ndarray:
        """The elements, sharing the memory: writable for shared buffers, read-only for others, which may be constants
        or the caller's arrays."""
        found = self._buffer(buffer)
        if not self.has_shared_buffers():
            raise BackendError(f"the memory of {self.devices[0].device_kind} is not shared; use buffer_to_numpy")
        return self.buffer_to_numpy(found).reshape(-1) if found.shared is None else found.shared

    def buffer_from_numpy(self, array: np.ndarray, device_num: int = 0) -> Buffer:
        """Shares the memory on a CPU if it is contiguous and aligned to 64 bytes; else a copy."""
        return self._put(array_of(array, "BufferFromNumpy"), device_num)

    def buffer_to_numpy(self, buffer: Buffer) -> np.ndarray:
        """The elements, read-only; on a CPU they share the memory."""
        return np.asarray(self._array(buffer))

    def buffer_from_torch(self, tensor: torch.Tensor, device_num: int = 0) -> Buffer:
        """Through DLPack."""
        from easytorch.backends.xla.torch_exchange import from_torch

        self._require_open()
        array, shape = from_torch(tensor_of(tensor), self._device(device_num))
        return XlaBuffer(array, spec(shape, device_num))

    def buffer_to_torch(self, buffer: Buffer) -> torch.Tensor:
        """Through DLPack."""
        from easytorch.backends.xla.torch_exchange import to_torch

        shape = self.buffer_shape(buffer)
        return to_torch(self._array(buffer), shape)

    def _put(self, array: np.ndarray, device_num: int, *, copy: bool = False) -> XlaBuffer:
        self._require_open()
        shape = make_shape(array.dtype, array.shape)
        return XlaBuffer(pjrt.put(array, self._device(device_num), copy=copy), spec(shape, device_num))

    def _device(self, device_num: int) -> Any:
        return self.devices[device_number(device_num, len(self.devices), self.name)]

    def _spec(self, buffer: Buffer) -> tuple[Shape, int]:
        found = self._buffer(buffer).spec
        if found is None:
            raise gone(buffer)
        return found

    def _array(self, buffer: Buffer) -> Any:
        # Read once: another thread may donate it in between.
        array = self._buffer(buffer).array
        if array is None:
            raise gone(buffer)
        return array

    def _buffer(self, buffer: Buffer) -> XlaBuffer:
        self._require_open()
        return valid(buffer)

    def _require_open(self) -> None:
        if self._finalized:
            raise BackendError("the backend 'xla' is finalized; make a new one")


register("xla", XlaBackend)
