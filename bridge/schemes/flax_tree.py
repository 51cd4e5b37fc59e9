"""HF Flax: the names of the Flax classes of transformers up to 4.57, and by convention those of any other model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from easytorch.bridge.core.config import Config
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.names.architecture import Architecture
from easytorch.bridge.names.flax_convention import flax_rules
from easytorch.bridge.rules.table import Rules


class FlaxTree:
    """The scheme of every tree that no other scheme recognises."""

    name = "flax"
    by_outline = True

    def recognises(self, tensors: Mapping[str, TensorInfo], config: Config | None) -> bool:
        """Always true: it is tried last."""
        return True

    def rules(self, config: Config, architecture: Architecture, tensors: Mapping[str, TensorInfo] | None) -> Rules:
        """The table of the family, or the convention's for its modules."""
        return flax_rules(config, architecture)

    def infer_config(self, tensors: Mapping[str, TensorInfo]) -> dict[str, Any] | None:
        """None: HF writes config.json beside every checkpoint."""
        return None
