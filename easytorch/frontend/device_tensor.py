"""`DeviceTensor`: a backend's buffer as a torch tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from easytorch.backends.interface import Backend, Buffer


class DeviceTensor(torch.Tensor):
    """A tensor that a forward saves for its backward: it stays on the backend's device as a buffer.

    It can be stored and passed around like any tensor; the first operation on it fetches its values.
    """

    backend: Backend
    buffer: Buffer

    @staticmethod
    def __new__(cls, backend: Backend, buffer: Buffer) -> DeviceTensor:
        shape = backend.buffer_shape(buffer)
        dtype = getattr(torch, shape.dtype.value)
        tensor = torch.Tensor._make_wrapper_subclass(cls, shape.dimensions, dtype=dtype)
        tensor.backend, tensor.buffer = backend, buffer
        return tensor

    def fetch(self) -> torch.Tensor:
        """The values as a plain tensor."""
        return self.backend.buffer_to_torch(self.buffer)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs `func` on the values."""
        if func is torch.ops.aten.detach.default:
            return cls(args[0].backend, args[0].buffer)
        args, kwargs = pytree.tree_map_only(cls, cls.fetch, (tuple(args), dict(kwargs or {})))
        return func(*args, **kwargs)
