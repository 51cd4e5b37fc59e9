"""torch tensors and jax arrays that share memory, through DLPack, or on a CPU through numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from easytorch.backends.dtypes import DType, dtype_of
from easytorch.backends.errors import BackendError
from easytorch.backends.shapes import Shape
from easytorch.backends.xla import pjrt

# numpy lacks these types, so torch hands over their bits.
_BITS = {
    DType.BFLOAT16: torch.int16,
    DType.FLOAT8_E4M3FN: torch.uint8,
    DType.FLOAT8_E5M2: torch.uint8,
    DType.FLOAT8_E4M3FNUZ: torch.uint8,
    DType.FLOAT8_E5M2FNUZ: torch.uint8,
}


def from_torch(tensor: torch.Tensor, device: Any) -> tuple[Any, Shape]:
    """A jax array of the tensor's elements, sharing its memory where it is contiguous and on the device; and its
    shape."""
    dtype = _dtype(tensor.dtype)
    shape = Shape(dtype, tuple(tensor.shape))
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if plain.device.type != "cpu" and device.platform != "cpu":
        return pjrt.from_dlpack(plain, device), shape
    return pjrt.put(_as_numpy(plain.cpu(), dtype), device), shape


def to_torch(array: Any, shape: Shape) -> torch.Tensor:
    """A torch tensor of the array's elements, sharing its memory where DLPack has the type."""
    dtype = getattr(torch, shape.dtype.value, None)
    if dtype is None or shape.dtype.bits < 8:
        raise BackendError(f"torch does not hold {shape}; use buffer_to_numpy")
    if shape.dtype.size == 1 and shape.dtype.is_float:
        return torch.from_numpy(np.asarray(array).view(np.uint8).copy()).view(dtype)
    tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(array)
    return tensor


def _dtype(given: torch.dtype) -> DType:
    found = dtype_of(given)
    if found.bits < 8:
        raise BackendError(f"the elements of torch's {given} cannot be read; use buffer_from_numpy")
    return found


def _as_numpy(tensor: torch.Tensor, dtype: DType) -> np.ndarray:
    bits = _BITS.get(dtype)
    return tensor.numpy() if bits is None else tensor.view(bits).numpy().view(dtype.numpy)
