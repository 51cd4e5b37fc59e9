"""The rule tables of the families in `easytorch.models`."""

from __future__ import annotations

import importlib
import pkgutil
from importlib.util import find_spec

from easytorch.bridge.rules.table import Rules


def native_rules(model_type: str) -> Rules | None:
    """`RULES` of `easytorch.models.<model_type>`, None for a family that is not native or follows the convention.

    Read from `_<model_type>_rules.py` where that stands beside the family's modules, which import torch.
    """
    name = model_type.replace("-", "_")
    if name not in families():
        return None
    apart = f"easytorch.models._{name}_rules"
    module = importlib.import_module(apart if find_spec(apart) else f"easytorch.models.{name}")
    return getattr(module, "RULES", None)


def families() -> list[str]:
    """The names under which `easytorch.models` holds a family, without importing any."""
    package = importlib.import_module("easytorch.models")
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__) if not module.name.startswith("_"))
