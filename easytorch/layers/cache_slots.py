"""The memory for the key and value of one more token in transformers' caches, so that they are written in place.

A dynamic cache grows by concatenation, which copies all of it at each layer of each token. `slot_of` gives its layer
memory for some more tokens; `keys` and `values` are views of that memory, of the tokens written so far.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from easytorch.kernels.decoder_step.native import Slot

# New memory has room for this share of the tokens there are, and for a few at least.
SHARE, LEAST = 8, 64

_UPDATE = Cache.update


class KVBuffer:
    """The memory of a dynamic layer; `keys` and `values` are the views that the layer has been given last."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        tokens = keys.shape[2]
        size = tokens + max(LEAST, tokens // SHARE)
        self.memory = _extended(keys, size), _extended(values, size)
        self.begin, self.end = 0, tokens
        self.keys, self.values = keys, values

    def is_of(self, layer: Any) -> bool:
        """Whether the layer's tensors are those given last, and there is memory for one more token.

        A layer that was cropped, reordered or copied has others, and its next token must not be written into these.
        """
        return self.keys is layer.keys and self.values is layer.values and self.end < self.memory[0].shape[2]


class Target(NamedTuple):
    """A slot, and the layer of the cache it belongs to, which learns of the token by `written`."""

    slot: Slot
    layer: Any
    buffer: KVBuffer | None

    def written(self) -> None:
        """Called when the slot has been written."""
        layer, buffer = self.layer, self.buffer
        if buffer is None:
            layer.cumulative_length.add_(1)
            return
        buffer.end += 1
        if type(layer) is DynamicSlidingWindowLayer:
            layer.cumulative_length += 1
            buffer.begin = max(buffer.begin, buffer.end - layer.sliding_window + 1)
        keys, values = buffer.memory
        seen = buffer.begin, buffer.end - buffer.begin
        buffer.keys = layer.keys = keys.narrow(2, *seen)
        buffer.values = layer.values = values.narrow(2, *seen)


def slot_of(cache: Any, layer_idx: int, rows: int, dtype: torch.dtype) -> Target | None:
    """The slot of one more token of each row; None for a cache that only its own `update` can fill.

    A static layer's slot has all of its keys seen, as `update` returns them: a mask hides what was not written.
    """
    if not isinstance(cache, Cache) or getattr(cache, "offloading", False) or not 0 <= layer_idx < len(cache.layers):
        return None
    layer: Any = cache.layers[layer_idx]
    kind = type(layer)
    if kind not in (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer) or not layer.is_initialized:
        return None
    if type(cache).update is not _UPDATE:  # a cache with limits of its own says whether it would take the token
        has_room = getattr(cache, "has_room", None)
        if has_room is None or not has_room(layer_idx, rows, 1):
            return None
    keys, values = layer.keys, layer.values
    buffer: KVBuffer | None = layer.__dict__.get("_buffer")
    if buffer is not None and not buffer.is_of(layer):
        buffer = None
    # those of a buffer are views of memory that was made for plain ones
    plain = keys.dtype is dtype and keys.shape[0] == rows if buffer is not None else _plain(keys, values, rows, dtype)
    if not plain:
        return None
    if kind is StaticLayer:
        at = int(layer.cumulative_length)
        return Target(Slot(keys, values, 0, at, keys.shape[2]), layer, None) if at < keys.shape[2] else None
    if kind is DynamicSlidingWindowLayer and (layer.record_past or layer.sliding_window < 2):
        return None
    if buffer is None:
        buffer = layer._buffer = KVBuffer(keys, values)
    return Target(Slot(*buffer.memory, first=buffer.begin, slot=buffer.end, end=buffer.end + 1), layer, buffer)


def _extended(tensor: Tensor, size: int) -> Tensor:
    """(B, K, S, D) -> (B, K, size, D), whose first S are those of `tensor`."""
    memory = tensor.new_empty(*tensor.shape[:2], size, tensor.shape[3])
    memory[:, :, : tensor.shape[2]] = tensor
    return memory


def _plain(keys: Any, values: Any, rows: int, dtype: torch.dtype) -> bool:
    """Whether they are keys and values of so many rows as the operator reads them."""
    for tensor in (keys, values):
        if type(tensor) is not Tensor or tensor.dtype is not dtype or not tensor.is_cpu or tensor.dim() != 4:
            return False
        if tensor.shape[0] != rows or tensor.requires_grad or tensor.stride(3) != 1:
            return False
    return bool(keys.shape[:3] == values.shape[:3])
