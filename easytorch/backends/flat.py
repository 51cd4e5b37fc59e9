"""Checks of the arrays and device numbers in every backend's data interface."""

from __future__ import annotations

from typing import Any

import numpy as np

from easytorch.backends.arguments import integer
from easytorch.backends.dtypes import array_of
from easytorch.backends.errors import BackendError
from easytorch.backends.shapes import Shape, shape_of
from easytorch.backends.types import DeviceNum


def flat_source(flat: Any, shape: Any) -> np.ndarray:
    """The elements for `buffer_from_flat_data`, under the dimensions of `shape`."""
    wanted = shape_of(shape, "BufferFromFlatData: shape")
    given = array_of(flat, "BufferFromFlatData")
    if given.dtype != wanted.dtype.numpy or given.shape != (wanted.size,):
        raise BackendError(
            f"BufferFromFlatData: {wanted} needs a one-dimensional array of {wanted.size} {wanted.dtype}, and "
            f"{given.dtype}{list(given.shape)} was given"
        )
    return given.reshape(wanted.dimensions)


def flat_target(flat: Any, shape: Shape) -> np.ndarray:
    """The array that `buffer_to_flat_data` writes to."""
    if not isinstance(flat, np.ndarray):
        raise BackendError(f"BufferToFlatData: a numpy array is written to, and {type(flat).__name__} was given")
    if flat.dtype != shape.dtype.numpy or flat.shape != (shape.size,):
        raise BackendError(
            f"BufferToFlatData: {shape} needs a one-dimensional array of {shape.size} {shape.dtype}, and "
            f"{flat.dtype}{list(flat.shape)} was given"
        )
    if not flat.flags.writeable:
        raise BackendError("BufferToFlatData: the array is read only; give one that may be written")
    return flat


def zeros(shape: Any) -> np.ndarray:
    """The memory of a shared buffer."""
    wanted = shape_of(shape, "NewSharedBuffer: shape")
    try:
        return np.zeros(wanted.dimensions, wanted.dtype.numpy)
    except MemoryError as error:
        raise BackendError(f"NewSharedBuffer: there is no memory for {wanted}: {error}") from None


def tensor_of(given: Any) -> Any:
    """The torch tensor that an argument is."""
    import torch

    if not isinstance(given, torch.Tensor):
        raise BackendError(f"BufferFromTorch: a torch tensor is needed, and {type(given).__name__} was given")
    if given.layout is not torch.strided or given.device.type == "meta":
        where = f"{given.layout} on {given.device}"
        raise BackendError(f"BufferFromTorch: the tensor is {where}, without elements in a row; make it dense")
    return given


def device_number(number: Any, count: int, backend: str) -> DeviceNum:
    """A device of a backend that has `count`."""
    found = integer(number, "the device number")
    if not 0 <= found < count:
        raise BackendError(f"device {found} is none of the {count} of the backend {backend!r}")
    return DeviceNum(found)


def device_count(number: Any, count: int, backend: str) -> int:
    """On how many devices a computation is to run, of the `count` that a backend has."""
    found = integer(number, "the number of devices")
    if not 1 <= found <= count:
        raise BackendError(f"builder: {found} devices were requested, but the backend {backend!r} has {count}")
    return found
