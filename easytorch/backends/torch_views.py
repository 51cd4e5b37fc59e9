"""torch tensors and numpy arrays over the same memory, also of element types that only one of them can name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from easytorch.backends.dtypes import dtype_of
from easytorch.backends.errors import BackendError

if TYPE_CHECKING:
    import torch

# The integers of the same size as which numpy and torch exchange the types that numpy lacks.
_STORAGE_DTYPES = {1: "uint8", 2: "int16"}


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's elements: over its memory if it is on the CPU, a copy otherwise."""
    import torch

    dtype = dtype_of(tensor.dtype)
    here = tensor.detach().cpu().resolve_conj().resolve_neg()
    if hasattr(np, dtype.value):
        return here.numpy()
    return here.view(getattr(torch, _STORAGE_DTYPES[dtype.size])).numpy().view(dtype.numpy)


def to_torch(array: np.ndarray) -> torch.Tensor:
    """The array's elements: over its memory if it may be written, else a copy; `BackendError` for int4 and uint4."""
    import torch

    dtype = dtype_of(array.dtype)
    if dtype.bits == 4:
        raise BackendError(f"torch has no tensors of {dtype}; convert to int8 or uint8")
    if not array.flags.writeable:
        array = array.copy()
    if hasattr(np, dtype.value):
        # torch knows numpy's types by their names in C: `ulonglong` is none to it.
        return torch.from_numpy(array if array.dtype is dtype.numpy else array.view(dtype.numpy))
    return torch.from_numpy(array.view(_STORAGE_DTYPES[dtype.size])).view(getattr(torch, dtype.value))
