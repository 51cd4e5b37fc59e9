"""An open checkpoint as what writers read tensors from."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from easytorch.bridge.core.config import Config
from easytorch.bridge.core.in_parts import InParts, read_in_parts
from easytorch.bridge.core.reader import Reader
from easytorch.bridge.core.tensor_info import TensorInfo

# Called with the tensor just written, the bytes written so far and the bytes in all.
Progress = Callable[[str, int, int], None]


class ReaderSource:
    """The tensors of an open checkpoint, with progress over their bytes."""

    def __init__(
        self, reader: Reader, config: Config | None, progress: Progress | None = None, origin: Reader | None = None
    ) -> None:
        self.config = config
        self.origin = origin
        self._reader = reader
        self._progress = progress
        self._total = sum(info.nbytes for info in reader.tensors.values())
        self._done = 0
        self._lock = threading.Lock()

    def read(self, name: str) -> np.ndarray:
        """The elements of one tensor."""
        return self._reader.read(name)

    def read_in_parts(self, name: str) -> InParts:
        """`read`, with the tensor in parts where the reader gives parts."""
        return read_in_parts(self._reader, name)

    def wrote(self, info: TensorInfo) -> None:
        """Counts the tensor and reports it; one call at a time, whichever threads write."""
        with self._lock:
            self._done += info.nbytes
            if self._progress is not None:
                self._progress(info.name, self._done, self._total)
