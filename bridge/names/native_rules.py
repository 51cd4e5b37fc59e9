"""The rule tables of the families in `easytorch.models`."""

from __future__ import annotations

import importlib
import pkgutil
from importlib.util import find_spec

from easytorch.bridge.rules.table import Rules


def native_rules(model_type: str) -> Rules | None:
    """`RULES` of `easytorch/models/_<model_type>_rules.py`, None for a family that has none and follows the convention.

    They stand apart from the family's modules because those import torch, which a conversion need not.
    """
    apart = f"easytorch.models._{model_type.replace('-', '_')}_rules"
    return importlib.import_module(apart).RULES if "." not in model_type and find_spec(apart) else None


def families() -> list[str]:
    """The names under which `easytorch.models` holds a family, without importing any."""
    package = importlib.import_module("easytorch.models")
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__) if not module.name.startswith("_"))
