"""Arrays in temporary files, for leaves that hold many tensors and are expensive to read again."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np

from easytorch.bridge.core.blocks import byte_blocks
from easytorch.bridge.core.mapped import map_file, stands_in_file
from easytorch.bridge.errors import CheckpointError

# Smaller arrays stay where they are.
_LEAST_BYTES = 1 << 16


class TempArrays:
    """Writes arrays to temporary files: in TMPDIR if that is set, else in `folder`, else in Python's default folder.

    Python's default is often in memory (a tmpfs) and too small, so a conversion's `folder` is its destination's.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder

    def put_aside(self, array: np.ndarray) -> np.ndarray:
        """`array` in a file of its own, deleted with the last view of it; the same array where it costs no memory.

        `CheckpointError` where the disk is full.
        """
        if array.nbytes < _LEAST_BYTES or stands_in_file(array):
            return array
        folder = tempfile.gettempdir() if self.folder is None or "TMPDIR" in os.environ else self.folder
        try:
            with tempfile.TemporaryFile(prefix="easytorch-", dir=folder, buffering=0) as file:
                # Not through the map: a full disk would raise SIGBUS, and written pages would count as memory.
                for block in byte_blocks(array):
                    while block:
                        block = block[file.write(block) :]
                memory = map_file(file.fileno())
        except OSError as error:
            message = f"no room to put {array.nbytes} bytes aside ({error.strerror}); set TMPDIR to a folder with more"
            raise CheckpointError(message, file=folder) from error
        return np.frombuffer(memory, array.dtype).reshape(array.shape)
