"""Arrays put aside in temporary files, for leaves that hold many tensors and cost much to read again."""

from __future__ import annotations

import mmap
import os
import tempfile

import numpy as np

from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.formats.blocks import contiguous

# Smaller arrays stay where they are.
_LEAST_BYTES = 1 << 16


def put_aside(array: np.ndarray) -> np.ndarray:
    """`array` in a file of its own that goes with the last view of it; the same array where it costs no memory.

    `CheckpointError` where the folder for temporary files (TMPDIR) has no room.
    """
    if array.nbytes < _LEAST_BYTES or _mapped(array):
        return array
    try:
        with tempfile.TemporaryFile(prefix="easytorch-") as file:
            # Room is taken now: a full disk would be a bus error later.
            os.posix_fallocate(file.fileno(), 0, array.nbytes)
            memory = mmap.mmap(file.fileno(), array.nbytes)
    except OSError as error:
        message = f"no room for {array.nbytes} bytes ({error.strerror}); set TMPDIR to a folder with more"
        raise CheckpointError(message, file=tempfile.gettempdir()) from error
    kept = np.frombuffer(memory, array.dtype).reshape(array.shape)
    return contiguous(array, kept)


def _mapped(array: np.ndarray) -> bool:
    """Whether the elements stand in a mapped file, as far as can be told, and not in this process's memory."""
    base: object = array
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    return not isinstance(base, np.ndarray)
