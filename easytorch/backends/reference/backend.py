"""The backend `numpy`: every operation computed by its definition, on devices simulated in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from easytorch.backends import torch_views
from easytorch.backends.arguments import text
from easytorch.backends.builder import Builder
from easytorch.backends.dtypes import DType, array_of, dtype_of
from easytorch.backends.errors import BackendError
from easytorch.backends.executable import TAKING, CheckedExecutable
from easytorch.backends.flat import device_count, device_number, flat_source, flat_target, tensor_of, zeros
from easytorch.backends.graph import Graph
from easytorch.backends.interface import Backend
from easytorch.backends.interpreter import CONTROL, Interpreter, Row
from easytorch.backends.reference.ops import FUNCTIONS
from easytorch.backends.registry import register
from easytorch.backends.shapeinference import accepted_dtypes
from easytorch.backends.shapes import Shape, make_shape
from easytorch.backends.types import Capabilities, DeviceNum

if TYPE_CHECKING:
    import torch

# A simulated device costs nothing: as many as a typical host has accelerators.
_DEVICES = 8
_CAPABILITIES = Capabilities(
    {op_type: accepted_dtypes(op_type) for op_type in (*CONTROL, *FUNCTIONS)}, frozenset(DType)
)


@dataclass(eq=False, slots=True)
class NumpyBuffer:
    """A contiguous array "on" a device; None once it is finalized or donated. shared: the caller holds the memory
    too."""

    array: np.ndarray | None
    device: DeviceNum
    shared: bool = False


class NumpyBackend(Backend):
    """config: how many devices it simulates; 8 if empty."""

    def __init__(self, config: str = "") -> None:
        if text(config, "the configuration") and not (config.isdecimal() and int(config) > 0):
            raise BackendError(f"numpy:{config}: what follows the colon is the number of devices to simulate")
        self._num_devices = int(config or _DEVICES)
        self._finalized = False

    @property
    def name(self) -> str:
        return "numpy"

    @property
    def description(self) -> str:
        return f"NumPy {np.__version__}: the definition of every operation, {self._num_devices} simulated devices"

    def num_devices(self) -> int:
        self._check()
        return self._num_devices

    def capabilities(self) -> Capabilities:
        """Every operation, for each element type that its shape rule accepts."""
        return _CAPABILITIES

    def builder(self, name: str, num_devices: int = 1) -> Builder:
        self._check()
        return Builder(self, name, device_count(num_devices, self._num_devices, self.name))

    def compile_graph(self, graph: Graph, num_devices: int) -> NumpyExecutable:
        """The program that interprets the graph."""
        self._check()
        return NumpyExecutable(self, graph, num_devices)

    def finalize(self) -> None:
        """Any later call but `is_finalized` raises."""
        self._finalized = True

    def is_finalized(self) -> bool:
        return self._finalized

    def buffer_finalize(self, buffer: NumpyBuffer) -> None:
        with TAKING:
            self._array(buffer)
            buffer.array = None

    def buffer_shape(self, buffer: NumpyBuffer) -> Shape:
        array = self._array(buffer)
        return Shape(dtype_of(array.dtype), array.shape)

    def buffer_device_num(self, buffer: NumpyBuffer) -> DeviceNum:
        self._array(buffer)
        return buffer.device

    def buffer_to_flat_data(self, buffer: NumpyBuffer, flat: np.ndarray) -> None:
        """Copies the elements into `flat`."""
        array = self._array(buffer)
        flat_target(flat, self.buffer_shape(buffer))[:] = array.reshape(-1)

    def buffer_from_flat_data(self, device_num: int, flat: Any, shape: Shape) -> NumpyBuffer:
        """A buffer with a copy of the elements."""
        return NumpyBuffer(flat_source(flat, shape).copy(), self._device(device_num))

    def has_shared_buffers(self) -> bool:
        return True

    def new_shared_buffer(self, device_num: int, shape: Shape) -> tuple[NumpyBuffer, np.ndarray]:
        """A buffer of zeros and its elements."""
        buffer = NumpyBuffer(zeros(shape), self._device(device_num), shared=True)
        return buffer, self.buffer_data(buffer)

    def buffer_data(self, buffer: NumpyBuffer) -> np.ndarray:
        """The elements, over the same memory."""
        return self._array(buffer).reshape(-1)

    def buffer_from_numpy(self, array: np.ndarray, device_num: int = 0) -> NumpyBuffer:
        """A buffer that shares the array's memory if it is contiguous, else a copy."""
        device, given = self._device(device_num), array_of(array, "BufferFromNumpy")
        make_shape(given.dtype, given.shape)
        return NumpyBuffer(np.ascontiguousarray(given).reshape(given.shape), device)

    def buffer_to_numpy(self, buffer: NumpyBuffer) -> np.ndarray:
        """The array itself."""
        return self._array(buffer)

    def buffer_from_torch(self, tensor: torch.Tensor, device_num: int = 0) -> NumpyBuffer:
        """A buffer that shares the tensor's memory if it is contiguous and on the CPU, else a copy."""
        return self.buffer_from_numpy(torch_views.to_numpy(tensor_of(tensor)), device_num)

    def buffer_to_torch(self, buffer: NumpyBuffer) -> torch.Tensor:
        """A tensor that shares the array's memory if that is writable, else a copy."""
        return torch_views.to_torch(self._array(buffer))

    def _check(self) -> None:
        if self._finalized:
            raise BackendError("the backend 'numpy' is finalized; make a new one")

    def _device(self, number: int) -> DeviceNum:
        self._check()
        return device_number(number, self._num_devices, self.name)

    def _array(self, buffer: NumpyBuffer) -> np.ndarray:
        self._check()
        if not isinstance(buffer, NumpyBuffer):
            raise BackendError(f"{type(buffer).__name__} is no buffer of the backend 'numpy'; use `buffer_from_numpy`")
        # Read once: another thread may donate it in between.
        array = buffer.array
        if array is None:
            raise BackendError("the buffer is finalized or was donated to an execution; make a new one")
        return array


class NumpyExecutable(CheckedExecutable):
    """Interprets a graph."""

    def __init__(self, backend: NumpyBackend, graph: Graph, num_devices: int) -> None:
        super().__init__(backend, graph, num_devices)
        self._program: Interpreter | None = Interpreter(graph, FUNCTIONS, lambda array: array, num_devices)

    def finalize(self) -> None:
        """Frees the program and its constants."""
        super().finalize()
        self._program = None

    def _take(self, inputs: Sequence[NumpyBuffer], donate: Sequence[bool]) -> list[np.ndarray]:
        for number, (buffer, donated) in enumerate(zip(inputs, donate, strict=True)):
            if donated and buffer.shared:
                self._refuse_shared(number)
        arrays = [buffer.array for buffer in inputs]
        for buffer, donated in zip(inputs, donate, strict=True):
            if donated:
                buffer.array = None
        return arrays  # type: ignore[return-value]

    def _run(self, taken: list[np.ndarray]) -> list[NumpyBuffer]:
        program = self._program
        if program is None:
            raise BackendError(f"{self._name!r} is finalized; compile it again")
        count = len(self._names)
        devices = tuple(range(self._num_devices))
        try:
            # The values of a parameter on all devices are `count` apart in the list.
            rows = program.run(devices, [taken[number :: count or 1] for number in range(count)])
            return self._outputs(taken, rows)
        except MemoryError as error:
            raise BackendError(f"{self._name!r}: there is no memory to run it: {error}") from None

    def _outputs(self, arrays: Sequence[np.ndarray], rows: Sequence[Row]) -> list[NumpyBuffer]:
        # The caller may write to an output: each owns its memory, shared with no input, constant or other output.
        seen = {id(array) for array in arrays}
        outputs = []
        for device in range(self._num_devices):
            for row in rows:
                array = row[device]
                if not array.flags.owndata or not array.flags.writeable or id(array) in seen:
                    array = array.copy()
                array = np.ascontiguousarray(array).reshape(array.shape)
                seen.add(id(array))
                outputs.append(NumpyBuffer(array, DeviceNum(device)))
        return outputs


register("numpy", NumpyBackend)
