"""Buffers that end where a page begins that cannot be read: what reads past its tensor ends the process."""

from __future__ import annotations

import ctypes
import mmap

import torch


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor again, contiguous, ending where a page begins that cannot be read."""
    page, size = mmap.PAGESIZE, tensor.numel() * tensor.element_size()
    room = -(-size // page) * page
    memory = mmap.mmap(-1, room + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(address + room), ctypes.c_size_t(page), 0) == 0, ctypes.get_errno()
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=room - size)
    return flat.view(tensor.shape).copy_(tensor)
