"""The backend `torch`: every operation on ATen, on any device that torch has, eagerly or through torch.compile.

What follows the colon of its configuration are the device, as torch writes it, and `compile`, in any order and with
a comma between: "torch", "torch:cuda", "torch:cuda:1", "torch:compile", "torch:compile,cuda". Without a device it is
torch's default one. It is one device of torch's; computations for several, with collectives, are simulated on it, one
device after the other, and not compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
from easytorch.backends.registry import register
from easytorch.backends.shapeinference import accepted_dtypes
from easytorch.backends.shapes import Shape, make_shape
from easytorch.backends.types import Capabilities, DeviceNum

try:
    import torch
except ImportError as error:
    raise ImportError("the backend 'torch' needs torch: pip install torch") from error

from easytorch.backends.aten.lockstep import LockstepInterpreter
from easytorch.backends.aten.lowering import Target, lower
from easytorch.backends.aten.ops.table import OPERATIONS
from easytorch.backends.aten.outputs import ownership
from easytorch.backends.aten.storage_dtypes import HELD, has_storage_dtype, held, storage_dtype

# Simulated devices are lists in one process and free; as many as the backend numpy has.
_SIMULATED = 8


@dataclass(eq=False, slots=True)
class TorchBuffer:
    """A contiguous tensor on a device; None once it is finalized or donated.

    owned: the memory is the buffer's alone, so that an execution it is donated to may write there. shared: the caller
    reads and writes it too. readers: executions that are reading it now.
    """

    tensor: torch.Tensor | None
    shape: Shape
    device: DeviceNum
    owned: bool
    shared: bool = False
    readers: int = 0


class TorchBackend(Backend):
    """`Backend` on torch's ATen; the docstring of the module says what `config` may be."""

    def __init__(self, config: str = "") -> None:
        self.compiles, self.torch_device = _configured(config)
        self._capabilities = _capabilities(self.torch_device)
        self._finalized = False

    @property
    def name(self) -> str:
        """The name it is registered under."""
        return "torch"

    @property
    def description(self) -> str:
        how = "through torch.compile" if self.compiles else "eagerly"
        return f"torch {torch.__version__}: ATen {how} on {self.torch_device}, {_SIMULATED} simulated devices"

    def num_devices(self) -> int:
        """How many devices it simulates."""
        self._check()
        return _SIMULATED

    def capabilities(self) -> Capabilities:
        """Every operation of every element type that its rule takes and the device holds."""
        return self._capabilities

    def builder(self, name: str, num_devices: int = 1) -> Builder:
        self._check()
        return Builder(self, name, device_count(num_devices, _SIMULATED, self.name))

    def compile_graph(self, graph: Graph, num_devices: int) -> TorchExecutable:
        """The function of the graph; for several devices an interpreter that runs them in lockstep."""
        self._check()
        return TorchExecutable(self, graph, num_devices)

    def finalize(self) -> None:
        """Everything but `is_finalized` is an error from now on."""
        self._finalized = True

    def is_finalized(self) -> bool:
        """Whether `finalize` was called."""
        return self._finalized

    def buffer_finalize(self, buffer: TorchBuffer) -> None:
        """Forgets the tensor."""
        with TAKING:
            self._tensor(buffer)
            buffer.tensor = None

    def buffer_shape(self, buffer: TorchBuffer) -> Shape:
        self._tensor(buffer)
        return buffer.shape

    def buffer_device_num(self, buffer: TorchBuffer) -> DeviceNum:
        self._tensor(buffer)
        return buffer.device

    def buffer_to_flat_data(self, buffer: TorchBuffer, flat: np.ndarray) -> None:
        """Copies the elements into `flat`."""
        tensor = self._tensor(buffer)
        flat_target(flat, buffer.shape)[:] = torch_views.to_numpy(tensor).reshape(-1)

    def buffer_from_flat_data(self, device_num: int, flat: Any, shape: Shape) -> TorchBuffer:
        """A buffer with a copy of the elements."""
        return self._buffer(torch_views.to_torch(flat_source(flat, shape).copy()), device_num, owned=True)

    def has_shared_buffers(self) -> bool:
        """Whether it runs on the CPU."""
        return self.torch_device.type == "cpu"

    def new_shared_buffer(self, device_num: int, shape: Shape) -> tuple[TorchBuffer, np.ndarray]:
        """A buffer of zeros and its elements."""
        self._require_shared("NewSharedBuffer")
        array = zeros(shape)
        buffer = self._buffer(torch_views.to_torch(array), device_num, owned=False)
        buffer.shared = True
        return buffer, array.reshape(-1)

    def buffer_data(self, buffer: TorchBuffer) -> np.ndarray:
        """The elements, over the same memory."""
        self._require_shared("BufferData")
        return self.buffer_to_numpy(buffer).reshape(-1)

    def buffer_from_numpy(self, array: np.ndarray, device_num: int = 0) -> TorchBuffer:
        """A buffer over the array's memory on the CPU, if it is contiguous and may be written, else of a copy."""
        self._device(device_num)
        given = array_of(array, "BufferFromNumpy")
        make_shape(given.dtype, given.shape)
        whole = np.ascontiguousarray(given).reshape(given.shape)
        shared = self.has_shared_buffers() and whole.flags.writeable and np.may_share_memory(whole, given)
        return self._buffer(torch_views.to_torch(whole), device_num, owned=not shared)

    def buffer_to_numpy(self, buffer: TorchBuffer) -> np.ndarray:
        """The elements: over the buffer's memory on the CPU, then for reading only; else a copy."""
        return torch_views.to_numpy(self._given_away(buffer))

    def buffer_from_torch(self, tensor: torch.Tensor, device_num: int = 0) -> TorchBuffer:
        """A buffer of the tensor itself if it is contiguous and on the device, else of a copy."""
        whole = tensor_of(tensor).detach().resolve_conj().resolve_neg()
        whole = whole.to(self.torch_device).contiguous()
        return self._buffer(whole, device_num, owned=whole.data_ptr() != tensor.data_ptr())

    def buffer_to_torch(self, buffer: TorchBuffer) -> torch.Tensor:
        """The tensor itself."""
        return self._given_away(buffer)

    def _given_away(self, buffer: TorchBuffer) -> torch.Tensor:
        """The tensor, which the caller may keep: its memory is not reused when the buffer is donated."""
        with TAKING:
            tensor = self._tensor(buffer)
            buffer.owned = False
            return tensor

    def _buffer(self, tensor: torch.Tensor, device_num: int, *, owned: bool) -> TorchBuffer:
        dtype = dtype_of(tensor.dtype)
        if dtype not in self._capabilities.dtypes:
            raise BackendError(f"{self.torch_device} holds no {dtype}")
        placed = tensor.to(self.torch_device)
        return TorchBuffer(placed, Shape(dtype, tuple(tensor.shape)), self._device(device_num), owned)

    def _check(self) -> None:
        if self._finalized:
            raise BackendError("the backend 'torch' is finalized; make a new one")

    def _require_shared(self, what: str) -> None:
        self._check()
        if not self.has_shared_buffers():
            raise BackendError(f"{what}: buffers on {self.torch_device} are not memory of this process; copy them")

    def _device(self, number: int) -> DeviceNum:
        self._check()
        return device_number(number, _SIMULATED, self.name)

    def _tensor(self, buffer: TorchBuffer) -> torch.Tensor:
        self._check()
        if not isinstance(buffer, TorchBuffer):
            raise BackendError(f"{type(buffer).__name__} is no buffer of the backend 'torch'; use `buffer_from_torch`")
        # Read once: another thread may donate it meanwhile.
        tensor = buffer.tensor
        if tensor is None:
            raise BackendError("the buffer is finalized or was donated to an execution; make a new one")
        return tensor


def _configured(config: str) -> tuple[bool, torch.device]:
    """Whether to compile, and the device."""
    parts = [part.strip() for part in text(config, "the configuration").split(",") if part.strip()]
    names = [part for part in parts if part != "compile"]
    if len(names) > 1 or len(parts) - len(names) > 1:
        raise BackendError(f"torch:{config}: it takes `compile` and one device, with a comma between")
    try:
        device = torch.device(names[0]) if names else torch.get_default_device()
        # With its number, if it has one, and an error if it is not there.
        device = torch.empty(0, device=device).device
    # Builds of torch without a device's library raise AssertionError for it.
    except (RuntimeError, AssertionError) as error:
        raise BackendError(f"torch:{config}: torch {torch.__version__} has no such device: {error}") from None
    if device.type == "meta":
        raise BackendError("torch:meta: tensors there have no elements, so that nothing runs")
    return len(names) < len(parts), device


def _capabilities(device: torch.device) -> Capabilities:
    dtypes = frozenset(dtype for dtype in HELD if _holds(device, dtype))
    return Capabilities({op_type: accepted_dtypes(op_type) & dtypes for op_type in sorted(OPERATIONS)}, dtypes)


def _holds(device: torch.device, dtype: DType) -> bool:
    """Whether tensors of the type can be made on the device: no float64 on Apple's, for one."""
    try:
        torch.empty(1, dtype=held(dtype), device=device)
    except (RuntimeError, TypeError):
        return False
    return True


@dataclass(slots=True)
class _Taken:
    """The tensors of an execution, the numbers of those it may write to, and the buffers that it reads."""

    tensors: list[torch.Tensor]
    writable: frozenset[int]
    read: list[TorchBuffer]


class TorchExecutable(CheckedExecutable):
    """A graph as a function of tensors."""

    def __init__(self, backend: TorchBackend, graph: Graph, num_devices: int) -> None:
        super().__init__(backend, graph, num_devices)
        self._torch = backend
        self._ownership = ownership(graph)
        self._graph: Graph | None = graph
        self._functions: dict[frozenset[int], Any] = {}
        self._lockstep: LockstepInterpreter | None = None
        try:
            # Tables of indices and counts are made here, and there may be no room for one.
            if num_devices > 1:
                self._lockstep = LockstepInterpreter(graph, backend.torch_device, num_devices)
            else:
                self._function(frozenset())
        except (RuntimeError, MemoryError) as error:
            raise BackendError(f"{self._name!r}: torch cannot prepare it: {error}") from error
        self._views = [
            storage_dtype(shape.dtype) if has_storage_dtype(shape.dtype) else None for shape in self._input_shapes
        ]
        self._held = [held(shape.dtype) if has_storage_dtype(shape.dtype) else None for shape in self._output_shapes]

    def finalize(self) -> None:
        """Frees the function and its constants."""
        super().finalize()
        self._functions = {}
        self._lockstep = self._graph = None

    def _function(self, writable: frozenset[int]) -> Any:
        """The function that may write into the memory of these parameters."""
        found = self._functions.get(writable)
        if found is None:
            if self._graph is None:
                raise BackendError(f"{self._name!r} is finalized; compile it again")
            target = Target(self._torch.torch_device, self._torch.compiles)
            found = self._functions[writable] = lower(self._graph, target, writable)
        return found

    def _take(self, inputs: Sequence[TorchBuffer], donate: Sequence[bool]) -> _Taken:
        for number, (buffer, given) in enumerate(zip(inputs, donate, strict=True)):
            if given and buffer.shared:
                self._refuse_shared(number)
        tensors = [
            buffer.tensor if view is None else buffer.tensor.view(view)  # type: ignore[union-attr]
            for buffer, view in zip(inputs, self._views * self._num_devices, strict=True)
        ]
        writable, read = [], []
        for number, (buffer, given) in enumerate(zip(inputs, donate, strict=True)):
            if not given:
                buffer.readers += 1
                read.append(buffer)
                continue
            if buffer.owned and not buffer.readers:
                writable.append(number)
            # Before it runs: each value is then freed after its last use.
            buffer.tensor = None
        return _Taken(tensors, frozenset(writable), read)  # type: ignore[arg-type]

    def _run(self, taken: _Taken) -> list[TorchBuffer]:
        try:
            return self._computed(taken.tensors, taken.writable)
        except (RuntimeError, MemoryError) as error:
            raise BackendError(f"{self._name!r}: torch cannot run it: {error}") from error
        finally:
            with TAKING:
                for buffer in taken.read:
                    buffer.readers -= 1

    def _computed(self, tensors: list[torch.Tensor], writable: frozenset[int]) -> list[TorchBuffer]:
        count = len(self._names)
        with torch.no_grad():
            if self._num_devices == 1:
                return self._outputs(self._function(writable)(*tensors), writable, 0)
            lockstep = self._lockstep
            if lockstep is None:
                raise BackendError(f"{self._name!r} is finalized; compile it again")
            rows = [tuple(tensors[number::count]) for number in range(count)]
            found = lockstep.run(tuple(range(self._num_devices)), rows)
            # Collectives give several devices one tensor.
            return [
                buffer
                for device in range(self._num_devices)
                for buffer in self._outputs([row[device].clone() for row in found], frozenset(), device)
            ]

    def _outputs(self, results: Sequence[torch.Tensor], writable: frozenset[int], device: int) -> list[TorchBuffer]:
        copied, parameters = self._ownership.copied, self._ownership.parameters
        buffers = []
        for place, (tensor, held_type, shape) in enumerate(zip(results, self._held, self._output_shapes, strict=True)):
            if not tensor.is_contiguous():
                tensor = tensor.contiguous()
            elif place in copied or (place in parameters and parameters[place] not in writable):
                tensor = tensor.clone()
            buffers.append(
                TorchBuffer(
                    tensor if held_type is None else tensor.view(held_type), shape, DeviceNum(device), owned=True
                )
            )
        return buffers


register("torch", TorchBackend)
