"""Arrays on XLA's devices: jax arrays, with the shape and the device that programs compare."""

from __future__ import annotations

from typing import Any

import numpy as np

from easytorch.backends.dtypes import DType
from easytorch.backends.errors import BackendError
from easytorch.backends.flat import zeros
from easytorch.backends.shapes import Shape

# A shape on a device. Equal ones are the same object, so that comparing lists of them compares pointers.
Spec = tuple[Shape, int]
_SPECS: dict[Spec, Spec] = {}
_ALIGNMENT = 64


def spec(shape: Shape, device_num: int) -> Spec:
    """The one object for a shape on a device."""
    found = (shape, device_num)
    return _SPECS.setdefault(found, found)


class XlaBuffer:
    """`array` and `spec` are None once it is finalized or donated: `gone` makes the error."""

    __slots__ = ("array", "gone", "shared", "spec")

    def __init__(self, array: Any, spec: Spec, shared: np.ndarray | None = None) -> None:
        self.array: Any = array
        self.spec: Spec | None = spec
        # The caller's own view of the memory, one-dimensional and writable.
        self.shared = shared
        self.gone = ""

    def release(self, why: str) -> None:
        """Drops the array."""
        self.gone = why
        # The array last: a thread that has read it and still finds the spec has a valid array.
        self.spec = None
        self.shared = None
        self.array = None

    def __repr__(self) -> str:
        return f"<XlaBuffer {self.gone}>" if self.spec is None else f"<XlaBuffer {self.spec[0]} on {self.spec[1]}>"


def valid(buffer: Any) -> XlaBuffer:
    """The buffer; `BackendError` for another type, or one that was released."""
    if not isinstance(buffer, XlaBuffer):
        raise BackendError(f"{type(buffer).__name__} is no buffer of the backend 'xla'; make one by buffer_from_numpy")
    if buffer.spec is None:
        raise gone(buffer)
    return buffer


def gone(buffer: XlaBuffer) -> BackendError:
    """The error for the use of a released buffer."""
    return BackendError(f"the buffer is {buffer.gone}; it cannot be used any more")


def aligned_zeros(shape: Shape) -> np.ndarray:
    """Zeros aligned to 64 bytes, which XLA uses without a copy."""
    memory = zeros(Shape(DType.UINT8, (shape.nbytes + _ALIGNMENT,)))
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + shape.nbytes].view(shape.dtype.numpy).reshape(shape.dimensions)
