"""Torch tensors on a backend's device: parameters are put there once, and again when they were written to."""

from __future__ import annotations

from collections.abc import Collection, Iterable, MutableMapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from easytorch.backends.interface import Backend, Buffer
from easytorch.frontend.device_tensor import DeviceTensor
from easytorch.frontend.versions import version_of

# Of every backend that lives, the buffers of parameters that do, with the version that was put there.
_KEPT: WeakKeyDictionary[Backend, WeakTensorKeyDictionary] = WeakKeyDictionary()


def on_device(backend: Backend, tensor: torch.Tensor) -> Buffer:
    """The tensor as a buffer of the backend; that of a parameter is kept for the next call."""
    if isinstance(tensor, DeviceTensor):
        if tensor.backend is backend:
            return tensor.buffer
        tensor = tensor.fetch()
    if not isinstance(tensor, torch.nn.Parameter):
        return backend.buffer_from_torch(tensor.detach() if tensor.requires_grad else tensor)
    kept = _KEPT.setdefault(backend, WeakTensorKeyDictionary())
    version = version_of(tensor)
    entry = kept.get(tensor)
    if entry is None or entry[0] != version:
        entry = kept[tensor] = (version, backend.buffer_from_torch(tensor.detach()))
    return entry[1]


def forget(backend: Backend, tensors: Iterable[torch.Tensor]) -> None:
    """Makes the next read copy the parameters to the device again: a write to `.data` does not change their version."""
    kept: MutableMapping[torch.Tensor, Any] = _KEPT.get(backend, {})
    for tensor in tensors:
        kept.pop(tensor, None)


class Weights:
    """The tensors of one module on a backend's device.

    mutated: the numbers of those that the program writes to. Their buffers are the program's own, and donated; `put`
    takes the new ones, and the module's tensors follow with `sync`. The other buffers are `on_device`'s.
    """

    def __init__(self, backend: Backend, tensors: Sequence[torch.Tensor], mutated: Collection[int]) -> None:
        self._backend = backend
        self._tensors = list(tensors)
        self._mutated = frozenset(mutated)
        self.bind()

    def bind(self) -> None:
        """Copies every tensor to the device again, replacing the values that the program wrote."""
        forget(self._backend, self._tensors)
        self._versions = [(-1, -1)] * len(self._tensors)
        self._buffers: list[Buffer] = [None] * len(self._tensors)
        self.buffers()

    def buffers(self) -> list[Buffer]:
        """One buffer a tensor, as they were last written to: by the module's owner or by the program."""
        versions = [version_of(tensor) for tensor in self._tensors]
        if versions != self._versions:
            for number, tensor in enumerate(self._tensors):
                if versions[number] != self._versions[number]:
                    if number in self._mutated:
                        # What is donated must not be memory that the module goes on using.
                        self._buffers[number] = self._backend.buffer_from_torch(tensor.detach().clone())
                    else:
                        self._buffers[number] = on_device(self._backend, tensor)
            self._versions = versions
        return self._buffers

    def put(self, number: int, buffer: Buffer) -> None:
        """Stores the value that the program computed for a mutated tensor."""
        self._buffers[number] = buffer

    def written(self) -> dict[int, torch.Tensor]:
        """Copies of the mutated tensors, as they are on the device: the next call donates their memory."""
        return {number: self._backend.buffer_to_torch(self._buffers[number]).clone() for number in self._mutated}

    @torch.no_grad()
    def sync(self) -> None:
        """Copies the mutated tensors into the module's."""
        for number, tensor in self.written().items():
            self._tensors[number].copy_(tensor)
            self._versions[number] = version_of(self._tensors[number])
