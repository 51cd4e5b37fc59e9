"""Arrays in memory as what writers read tensors from."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from easytorch.bridge.core.config import Config
from easytorch.bridge.core.reader import Reader
from easytorch.bridge.core.tensor_info import TensorInfo


class ArraySource:
    """A writer's `Source` over a dict of numpy arrays."""

    origin: Reader | None = None

    def __init__(self, arrays: Mapping[str, np.ndarray], config: Config | None = None) -> None:
        self.config = config
        self._arrays = arrays

    def read(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def wrote(self, info: TensorInfo) -> None:
        """Nothing: nobody waits for arrays in memory."""
