"""Checkpoints with weights in their memory layout (stacked experts, gate and up joined), read by their hub names.

`save_pretrained(save_original_format=False)`, `torch.save(model.state_dict())` and DCP folders write this layout. Such
a tensor is split by transformers' engine when one of its parts is read, and the parts are cached for the next reads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from easytorch.bridge.core.context_manager import ContextManager
from easytorch.bridge.core.reader import Reader
from easytorch.bridge.core.tensor_info import TensorInfo
from easytorch.bridge.dtypes import to_numpy, to_torch
from easytorch.bridge.names.hub_names import HubNames

if TYPE_CHECKING:
    import torch

    from easytorch.bridge.names.outline import OutlinedNames


# Tensors whose parts are cached: writers alternate between a layer's two (gate and up, down), at its end four.
_KEPT = 4


class HubReader(ContextManager):
    """The weights of `reader` by hub names. It does not own `reader`."""

    def __init__(self, reader: Reader, names: HubNames) -> None:
        self._reader = reader
        self._names = names
        self.metadata = reader.metadata
        self.files = reader.files
        fused = sorted(names.fused & reader.tensors.keys())
        tensors = {name: info for name, info in reader.tensors.items() if name not in names.fused}
        # Hub name -> the stored tensors it is made of; several hub names share them.
        self._sources: dict[str, tuple[str, ...]] = {}
        for group in names.groups(fused):
            info = reader.tensors[group[0]]
            for name, made in names.to_hub({source: self._blank(source) for source in group}).items():
                self._sources[name] = group
                tensors[name] = TensorInfo(name, tuple(made.shape), info.dtype, info.file)
        self.tensors: Mapping[str, TensorInfo] = tensors
        self._lock = threading.Lock()
        self._made: OrderedDict[tuple[str, ...], dict[str, torch.Tensor]] = OrderedDict()

    def read(self, name: str) -> np.ndarray:
        """The data of one tensor; of a part, a view of its group's where the layout allows."""
        group = self._sources.get(name)
        if group is None:
            return self._reader.read(name)
        with self._lock:
            if group not in self._made:
                if len(self._made) == _KEPT:
                    self._made.popitem(last=False)
                self._made[group] = self._names.to_hub({one: to_torch(self._reader.read(one)) for one in group})
            self._made.move_to_end(group)
            return to_numpy(self._made[group][name])

    def _blank(self, name: str) -> torch.Tensor:
        import torch

        return torch.empty(self._reader.tensors[name].shape, device="meta")

    def close(self) -> None:
        """Nothing: whoever opened the reader closes it."""


def by_hub_names(reader: Reader, names: HubNames | OutlinedNames) -> Reader:
    """`reader` by hub names; `reader` itself where nothing in it has the memory layout."""
    return HubReader(reader, names) if isinstance(names, HubNames) and names.fused & reader.tensors.keys() else reader
