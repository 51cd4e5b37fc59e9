"""The two names of a torch weight: on disk ("hub names", what checkpoints hold) and in memory (module names).

They differ since transformers 5: experts are separate tensors on disk and one stack in memory, encoders lost a level
of modules, vision-language models moved theirs. transformers' own engine (core_model_loading.py, conversion_mapping.py)
maps one to the other when it loads and saves; it runs here on the meta device, so nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from easytorch.bridge.rules.table import modern_name

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Place:
    """The name of a checkpoint's weight in memory, and its conversion, if any."""

    name: str
    conversion: str | None


class HubNames:
    """The names of one model, given on the meta device.

    `tensors` are its parameters and persistent buffers by hub name, `scratch` the names of the buffers that
    transformers does not save any more and older checkpoints hold.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        self.model = model
        self.state: dict[str, torch.Tensor] = model.state_dict()
        tensors = self.to_hub(self.state)
        self.scratch = self.to_hub({**self.state, **dict(model.named_buffers())}).keys() - tensors.keys()
        changes = get_model_conversion_mapping(model)
        self._renamings = [change for change in changes if isinstance(change, WeightRenaming)]
        self._converters = [change for change in changes if isinstance(change, WeightConverter)]
        self.places = {name: self._place(name) for name in _sorted(tensors)}
        # In the order of the modules.
        order = {name: number for number, name in enumerate(self.state)}
        ranks = {name: order.get(place.name, len(order)) for name, place in self.places.items()}
        self.tensors = {name: tensors[name] for name in sorted(self.places, key=ranks.__getitem__)}
        self._hubs: dict[Place, list[str]] = {}
        for name, place in self.places.items():
            self._hubs.setdefault(place, []).append(name)
        # Module names of tensors that are split or joined on disk.
        self.fused = frozenset(name for name in self.state if Place(name, None) not in self._hubs)

    @property
    def floating(self) -> frozenset[str]:
        """The names on disk of the model's floating point tensors."""
        return frozenset(name for name, tensor in self.tensors.items() if tensor.dtype.is_floating_point)

    @property
    def base(self) -> str:
        """The attribute name of the base model in classes of the family."""
        return self.model.base_model_prefix

    @property
    def has_base(self) -> bool:
        """Whether the model is a head around a base model of that name."""
        return bool(self.base) and hasattr(self.model, self.base)

    @property
    def ties(self) -> Mapping[str, str]:
        """Names in memory: a weight that is tied -> the one it repeats."""
        return self.model.all_tied_weights_keys

    def to_hub(self, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A state dict as `save_pretrained` would write it: views of the tensors where the layouts allow.

        But for norms, which it writes under the names of before transformers 1.0 in families that still read those
        (ESM), and whose checkpoints on the Hub have the names in memory.
        """
        from transformers.core_model_loading import revert_weight_conversion

        reverted: dict[str, torch.Tensor] = revert_weight_conversion(self.model, dict(state_dict))
        return {modern_name(name): tensor for name, tensor in reverted.items()}

    def hub_name(self, module_name: str) -> str | None:
        """The name on disk of the weight `module_name` in memory; None where it is not a single tensor there."""
        return next(iter(self._hubs.get(Place(module_name, None), ())), None)

    def groups(self, fused: Iterable[str]) -> list[tuple[str, ...]]:
        """Names of `fused` that are converted together: those that make the same tensors on disk."""
        groups: dict[str, tuple[str, ...]] = {}
        for name in fused:
            made = self.to_hub({name: self.state[name]})
            group = (*dict.fromkeys(one for hub in made for one in groups.get(hub, ())), name)
            groups |= dict.fromkeys(made, group)
        return list(dict.fromkeys(groups.values()))

    def aliases(self, names: Iterable[str]) -> dict[str, str]:
        """Those of `names` that are spelled as in older or newer versions of transformers -> the hub name.

        Renames only: tensors that are split or joined differently have no alias.
        """
        found = {}
        for name in _sorted(set(names) - self.tensors.keys()):
            hubs = self._hubs.get(Place(name, None) if name in self.state else self._place(name), ())
            if hubs:
                found[name] = max(hubs, key=partial(_common_end, name))
        return found

    def _place(self, name: str) -> Place:
        from transformers.core_model_loading import rename_source_key

        place = Place(*rename_source_key(name, self._renamings, self._converters))
        if place.name not in self.state and name in self.state:
            return Place(name, None)
        if place.name not in self.state and (base := self.model.base_model_prefix):
            # Another head's checkpoint, or the base model's.
            return Place(*rename_source_key(name, self._renamings, self._converters, base, self.state))
        return place


def _sorted(names: Iterable[str]) -> list[str]:
    """In the order that transformers' engine needs: a rename may start with its first name."""
    from transformers.core_model_loading import dot_natural_key

    return sorted(names, key=dot_natural_key)


def _common_end(one: str, other: str) -> int:
    """How many components at the end of two names agree."""
    pairs = zip(reversed(one.split(".")), reversed(other.split(".")), strict=False)
    return next((place for place, (mine, theirs) in enumerate(pairs) if mine != theirs), len(one))
