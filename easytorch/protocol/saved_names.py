"""The tensors that `save_pretrained` writes of a model, by their names in a checkpoint, without their values.

transformers' own functions decide: which tied weights are left out, what is split or joined on disk, and in which files
the tensors stand. They run here on the meta device.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.distributed.gathering import Described


class SavedNames:
    """tensors: what a checkpoint of `model` holds, in the order of `save_pretrained`; each on the meta device.

    described: the model's tensors by the names of its modules. original: False keeps those names.
    """

    def __init__(self, model: PreTrainedModel, described: Mapping[str, Described], *, original: bool = True) -> None:
        self._model, self._original = model, original
        held = dict(described)
        for name in model._keys_to_ignore_on_save or ():
            held.pop(name, None)
        kept = _untied(model, held)
        self._state = {name: torch.empty(held[name].shape, dtype=held[name].dtype, device="meta") for name in kept}
        self.tensors: dict[str, Tensor] = self._converted(self._state) if original else dict(self._state)
        self.parameters = sum(one.numel for name, one in described.items() if one.trainable and one.tied == name)
        names = {id(tensor): name for name, tensor in self._state.items()}
        # Name in a checkpoint -> the tensors that it is made of, together with others; itself under its name in memory.
        self._sources: dict[str, tuple[str, ...]] = {
            name: (names[id(tensor)],) for name, tensor in self.tensors.items() if id(tensor) in names
        }
        self._makes: dict[tuple[str, ...], tuple[str, ...]] = {}
        fused = self._state.keys() - {one for (one,) in self._sources.values()}
        for group, made in self._groups([name for name in self._state if name in fused]).items():
            self._makes[group] = made
            self._sources |= dict.fromkeys(made, group)
        if lost := next((name for name in self.tensors if name not in self._sources), None):
            raise NotImplementedError(f"{type(model).__name__}: {lost} is made of tensors that are not known")

    def infos(self) -> dict[str, TensorInfo]:
        """As a reader describes them."""
        return {
            name: TensorInfo(name, tuple(one.shape), str(one.dtype).removeprefix("torch."))
            for name, one in self.tensors.items()
        }

    def sources(self, name: str) -> tuple[str, ...]:
        """The names in memory of the tensors that one in a checkpoint is made of."""
        return self._sources[name]

    def made_with(self, name: str) -> tuple[str, ...]:
        """The names in a checkpoint of those that are made of the same tensors, itself included."""
        return self._makes.get(self._sources[name], (name,))

    def make(self, name: str, tensors: Mapping[str, Tensor], wanted: Collection[str]) -> dict[str, Tensor]:
        """`name`, and those of `wanted` that are made with it, of the tensors of its `sources`."""
        group = self._sources[name]
        if group not in self._makes:
            return {name: tensors[group[0]]}
        made = self._converted({one: tensors[one] for one in group})
        return {one: tensor for one, tensor in made.items() if one == name or one in wanted}

    def files(self, pattern: str, max_shard_size: int | str, dtype: torch.dtype | None = None) -> dict[str, list[str]]:
        """File name -> names of its tensors, as `save_pretrained` divides them.

        pattern: with `{suffix}`. dtype: of floating point tensors in the files, where it is another.
        """
        tensors = self.tensors
        if dtype is not None:
            cast = {name: one.to(dtype) if one.is_floating_point() else one for name, one in self._state.items()}
            tensors = self._converted(cast) if self._original else cast
        divided = split_state_dict_into_shards_factory(
            dict(tensors),
            get_storage_size=lambda one: one.untyped_storage().nbytes(),
            get_storage_id=lambda one: one.untyped_storage()._cdata,
            filename_pattern=pattern,
            max_shard_size=max_shard_size,
        )
        return divided.filename_to_tensors

    def _groups(self, fused: Collection[str]) -> dict[tuple[str, ...], tuple[str, ...]]:
        """Names in memory of tensors that are converted together -> those in a checkpoint."""
        groups: dict[str, tuple[str, ...]] = {}  # by what they make
        for name in fused:
            made = self._converted({name: self._state[name]})
            group = (*dict.fromkeys(one for hub in made for one in groups.get(hub, ())), name)
            before = [hub for hub, other in groups.items() if set(other) & set(group)]
            groups |= dict.fromkeys([*before, *made], group)
        found: dict[tuple[str, ...], tuple[str, ...]] = {}
        for group in groups.values():
            if group not in found:
                found[group] = tuple(self._converted({name: self._state[name] for name in group}))
        return found

    def _converted(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        made: dict[str, Tensor] = revert_weight_conversion(self._model, dict(state))
        return made


def _untied(model: Any, described: Mapping[str, Described]) -> list[str]:
    """The names that are left when tied weights are written once."""
    stand_ins: dict[str, Tensor] = {}
    for name, one in described.items():
        shared = stand_ins.get(one.tied)
        stand_ins[name] = torch.empty(1) if shared is None else shared
    return list(remove_tied_weights_from_state_dict(stand_ins, model))
