"""`TransformerCache`: one of transformers' caches, for a number of rows and tokens."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    STATIC_LAYER_TYPE_MAPPING,
    Cache,
    EncoderDecoderCache,
    get_layer_types_and_kwargs,
)

from easytorch.cache.arguments import positive
from easytorch.cache.metadata import TransformerMetadata
from easytorch.cache.quantized import QuantizedKeysAndValues

KINDS = ("static", "dynamic", "int8", "int4", "nf4", "fp8")


class TransformerCache(Cache):
    """Keys and values of every layer; the layers' types are the config's: sliding windows keep their window, recurrent
    layers their states.

    kind: "static", memory for `max_length` tokens from the start, which compiled programs need; "dynamic", which
    grows; "int8", "int4", "nf4" or "fp8": grows, quantized. starts (B,): how many tokens of padding each row
    begins with. `ValueError` for more rows or tokens than it was made for.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        metadata: TransformerMetadata,
        kind: str = "static",
        starts: Tensor | None = None,
        *,
        group_size: int = 64,
        residual_length: int = 128,
    ) -> None:
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r} must be one of {', '.join(KINDS)}")
        settings = config.get_text_config(decoder=True)
        types, keywords = get_layer_types_and_kwargs(settings)
        if tuple(types) != metadata.layer_types:
            raise ValueError(f"the metadata has layers {metadata.layer_types}, and the config {tuple(types)}")
        positive(group_size=group_size)
        if type(residual_length) is not int or residual_length < 0:
            raise ValueError(f"residual_length={residual_length!r} must be an int of at least 0")
        if starts is not None:
            if tuple(starts.shape) != (metadata.batch_size,):
                raise ValueError(f"starts {tuple(starts.shape)} must be ({metadata.batch_size},): one for each row")
            if not bool(((starts >= 0) & (starts <= metadata.max_length)).all()):
                raise ValueError(f"starts={starts.tolist()} must be from 0 to max_length={metadata.max_length}")
        self.metadata, self.kind, self.starts = metadata, kind, starts
        if kind == "static":
            # attention layers alone take a length
            layers: list[Any] = [
                STATIC_LAYER_TYPE_MAPPING[name](max_cache_len=metadata.max_length, **more)
                for name, more in zip(types, keywords, strict=True)
            ]
        else:
            layers = [
                QuantizedKeysAndValues(kind, group_size, residual_length)
                if kind != "dynamic" and name == "full_attention"
                else DYNAMIC_LAYER_TYPE_MAPPING[name](**more)
                for name, more in zip(types, keywords, strict=True)
            ]
            if kind != "dynamic" and "full_attention" not in types:
                raise ValueError(f"kind={kind!r} is for layers of full attention; the config has {sorted(set(types))}")
        super().__init__(layers=layers)

    @property
    def rows(self) -> int:
        return self.metadata.batch_size

    @property
    def longest(self) -> int:
        return self.metadata.max_length

    def has_room(self, layer_idx: int, rows: int, tokens: int) -> bool:
        """Whether `update` would take that many more tokens and rows in this layer."""
        layer: Any = self.layers[layer_idx]
        past = int(layer.get_seq_length())
        return (past > 0 or rows <= self.rows) and past + tokens <= self.longest

    def attend_codes(
        self, query: Tensor, key: Tensor, value: Tensor, layer_idx: int, **features: Any
    ) -> Tensor | None:  # fmt: skip
        """Appends a token and attends to the quantized keys and values as they are, without a decoded copy of them.

        query (B, H, 1, D), key and value (B, K, 1, D) -> (B, 1, H, Dv). None, and nothing is appended, where `update`
        has to be called, which checks what it is given.
        """
        layer: Any = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        rows, heads, length, dim = key.shape
        if not isinstance(layer, QuantizedKeysAndValues) or features.pop("chunk_size", None) is not None:
            return None
        held = _held(layer)
        fits = held is not None and (held[0], held[1], held[3]) == (rows, heads, dim)
        if not fits or length != 1 or not self.has_room(layer_idx, rows, length):
            return None
        return layer.attend(query, key, value, **features)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in another order; `ValueError` for one that the cache does not hold."""
        self._check_rows(beam_idx)
        super().reorder_cache(beam_idx)  # type: ignore[arg-type] # integers of any width

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps some rows; `ValueError` for rows that are not there, and for a cache whose memory is allocated."""
        self._check_grows("batch_select_indices")
        self._check_rows(indices)
        super().batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times; `ValueError` for a cache whose memory is allocated."""
        self._check_grows("batch_repeat_interleave")
        positive(repeats=repeats)
        super().batch_repeat_interleave(repeats)

    def _check_grows(self, method: str) -> None:
        if self.kind == "static":
            raise ValueError(
                f"{method}: a static cache has {self.rows} rows from the start; make it with kind='dynamic', or order "
                "them by reorder_cache"
            )

    def _check_rows(self, indices: Tensor) -> None:
        held = next((shape[0] for one in self.layers if (shape := _held(one)) is not None), None)
        # elsewhere the indices are on the device, and to read them would wait for that
        if held is None or not indices.is_cpu or not indices.numel() or torch.compiler.is_compiling():
            return
        if int(indices.min()) < 0 or int(indices.max()) >= held:
            raise ValueError(f"rows {indices.tolist()} of a cache that holds {held}")

    def crop(self, tokens_to_remove: int) -> None:
        """As transformers' of a dynamic cache; `ValueError` for one whose memory is allocated, or in few bits.

        Where a layer refuses, all of them are as they were.
        """
        if self.kind == "static":
            raise ValueError(
                "a static cache cannot be cropped, as assisted generation does; make it with kind='dynamic'"
            )
        # a layer tells whether it can be cropped only by trying; its tensors are replaced, not written to
        before = [
            {name: copy.copy(one) if isinstance(one, dict | list) else one for name, one in vars(layer).items()}
            for layer in self.layers
        ]
        done = False
        try:
            super().crop(tokens_to_remove)
            done = True
        finally:
            if not done:
                for layer, values in zip(self.layers, before, strict=True):
                    vars(layer).clear()
                    vars(layer).update(values)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"the cache has {len(self.layers)} layers, and layer {layer_idx} writes to it: it is of another model"
            )
        layer: Any = self.layers[layer_idx]
        if not torch.compiler.is_compiling() and key_states.is_cpu:
            # elsewhere a length is on the device, and to read it would wait for that
            past = int(layer.get_seq_length()) if layer.is_initialized else 0
            if not past and key_states.shape[0] > self.rows:
                raise ValueError(
                    f"the cache is for {self.rows} rows, and {key_states.shape[0]} are given, each beam a row; make it "
                    "with a larger batch_size"
                )
            if past:
                _check_states(layer, key_states, layer_idx)
            if past + key_states.shape[-2] > self.longest:
                raise ValueError(
                    f"the cache is for {self.longest} tokens, and holds {past} with {key_states.shape[-2]} to come; "
                    "make it with a larger max_length"
                )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def _held(layer: Any) -> torch.Size | None:
    """(rows, heads, tokens, head_dim) of the keys in a layer, tokens that are not quantized apart; None without any."""
    for keys in (getattr(layer, "_quantized_keys", None), getattr(layer, "keys", None)):
        if keys is not None and len(keys.shape) == 4:
            shape: torch.Size = keys.shape
            return shape
    return None


def _check_states(layer: Any, key: Tensor, layer_idx: int) -> None:
    """`ValueError` for keys that cannot stand beside those of `layer`."""
    held = _held(layer)
    if held is None:
        return
    if held[0] != key.shape[0]:
        raise ValueError(f"the cache holds {held[0]} rows, and {key.shape[0]} are given")
    if (held[1], held[3]) != (key.shape[1], key.shape[3]):
        raise ValueError(
            f"layer {layer_idx} of the cache holds keys of (heads, head_dim) {(held[1], held[3])}, and gets "
            f"{(key.shape[1], key.shape[3])}: it is of another model"
        )


class EncoderDecoderTransformerCache(EncoderDecoderCache):
    """transformers' cache of a decoder and of the encoder's keys, the former a `TransformerCache`."""

    def check_dynamic_cache(self, method: str) -> None:
        """Nothing: transformers asks for its own class here, and a `TransformerCache` says itself what it cannot do."""
