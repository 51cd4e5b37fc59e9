"""The submodels of a composite model: parts that are models of another family, which follow that family's table."""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

from easytorch.bridge.names.hub_names import HubNames
from easytorch.bridge.names.native_rules import native_rules
from easytorch.bridge.rules.table import RuleTable, compile_rules

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Submodel:
    """A model, or a submodel whose class is in another file of transformers.

    `start` is the beginning of its hub names, `table` its family's, `level` the Flax folder around its leaves ("" or
    "vision_model/"): transformers 5 took a level of modules out of some towers, older checkpoints and Flax have it.
    """

    start: str
    table: RuleTable | None
    level: str

    def with_level(self, path: str) -> str:
        """A path in the model, with the level that this submodel has in Flax."""
        head = self.start.replace(".", "/")
        return f"{head}{self.level}{path.removeprefix(head)}"


def submodels_of(names: HubNames) -> list[Submodel]:
    """The model itself and the models in it, outer ones first."""
    from transformers import PreTrainedModel

    found: list[Submodel] = []
    files: dict[str, str] = {}
    for prefix, module in names.model.named_modules():
        if not isinstance(module, PreTrainedModel):
            continue
        start, file = f"{prefix}." if prefix else "", type(module).__module__
        # A stack of a model, or the base model of a head, is not a submodel.
        if not any(file == other and start.startswith(outer) for outer, other in files.items()):
            files[start] = file
            found.append(Submodel(_on_disk(start, names), _table(module), _level(module)))
    return found


def _on_disk(start: str, names: HubNames) -> str:
    """The prefix on disk of names that start with `start` in memory, where towers have another prefix."""
    starts = Counter(
        hub.removesuffix(inside)
        for hub, place in names.places.items()
        if place.name.startswith(start) and hub.endswith(inside := place.name.removeprefix(start))
    )
    return starts.most_common(1)[0][0] if start and starts else start


def table_of_names(model_type: str) -> tuple[RuleTable | None, bool]:
    """The table of a family, None for one that follows the convention; and whether it depends on the model."""
    module = _table_module(model_type)
    if module is not None and hasattr(module, "rules"):
        return None, True
    rules = module.RULES if module is not None else native_rules(model_type) if model_type else None
    return None if rules is None else compile_rules(rules), False


def _table(model: PreTrainedModel) -> RuleTable | None:
    model_type = model.config.model_type
    table, depends = table_of_names(model_type)
    module = _table_module(model_type)
    return compile_rules(module.rules(model)) if depends and module is not None else table


def _table_module(model_type: str) -> ModuleType | None:
    # No module can be called like "kosmos-2.5".
    name = f"easytorch.bridge.names.tables.{model_type.replace('-', '_').replace('.', '_')}"
    return importlib.import_module(name) if model_type and find_spec(name) is not None else None


def _level(model: PreTrainedModel) -> str:
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    changes = get_checkpoint_conversion_mapping(type(model).__name__) or ()
    gone = [
        change.prefix_to_remove for change in changes if isinstance(change, PrefixChange) and not change.model_prefix
    ]
    return f"{gone[0]}/" if gone and gone[0] else ""
