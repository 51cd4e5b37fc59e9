"""The interface of a naming scheme: it recognises its names, and maps a model's torch tensors to leaves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from easytorch.bridge.core.config import Config
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.names.architecture import Architecture
from easytorch.bridge.rules.table import Rules


class Scheme(Protocol):
    """The names and layouts of one program's checkpoints, in any file format."""

    name: str
    # Whether `rules` need no more of the architecture than names, shapes and ties, as an outline has them.
    by_outline: bool

    def recognises(self, tensors: Mapping[str, TensorInfo], config: Config | None) -> bool:
        """Whether `tensors` (by path, with "/") carry this scheme's names."""

    def rules(self, config: Config, architecture: Architecture, tensors: Mapping[str, TensorInfo] | None) -> Rules:
        """torch <-> leaf for the model `config` describes.

        tensors: the leaves of the checkpoint that is read, None when writing.
        """

    def infer_config(self, tensors: Mapping[str, TensorInfo]) -> dict[str, Any] | None:
        """config.json's content, inferred from names and shapes; None where that is not possible."""
