"""Quantized keys and values, except those of the last tokens (KIVI, arXiv:2402.02750)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import QuantizedLayer

from easytorch.kernels.decode.codes import Codes, decode, prefers
from easytorch.kernels.quantized_matmul.weight import QuantizedWeight, quantize
from easytorch.operations.dispatch.environment import untouched


class _Codes(NamedTuple):
    weight: QuantizedWeight
    shape: torch.Size
    dtype: torch.dtype


def _as_codes(codes: Any) -> Codes:
    weight = codes.weight
    groups = weight.scale.shape[1]
    data = weight.data.unflatten(0, codes.shape[:-1])
    return Codes(data, weight.scale.reshape(*codes.shape[:-1], groups), weight.group_size)


class QuantizedKeysAndValues(QuantizedLayer):
    """A layer that quantizes tokens to `format`, in groups of `group_size` features; the last ones are unquantized."""

    def __init__(self, format_: str, group_size: int = 64, residual_length: int = 128) -> None:
        super().__init__(nbits=8 if format_ in ("int8", "fp8") else 4, residual_length=residual_length)
        self.format, self.group_size = format_, group_size

    def _quantize(self, tensor: Tensor, axis: int) -> Any:  # type: ignore[override]
        rows = tensor.reshape(-1, tensor.shape[-1])
        return _Codes(quantize(rows, self.format, self.group_size), tensor.shape, tensor.dtype)

    def _dequantize(self, q_tensor: Any) -> Tensor:
        tensor: Tensor = q_tensor.weight.dequantize(q_tensor.dtype).reshape(q_tensor.shape)
        return tensor

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **features: Any) -> Tensor | None:
        """Appends one key and value (B, K, 1, D) and attends to the codes: query (B, H, 1, D) -> (B, 1, H, Dv).

        None, and nothing is appended, where `update` has to be called: the codes are of four bits, tokens are quantized
        with this one, rows wait to be reordered, or C++ does not take the call.
        """
        recent_keys: Any = self.keys
        recent = recent_keys.shape[-2] if self.is_initialized and recent_keys.dim() == 4 else 0
        if not self.is_initialized or self._pending_beam_idx is not None or recent + 1 >= self.residual_length:
            return None
        keys, values = _as_codes(self._quantized_keys), _as_codes(self._quantized_values)
        if query.shape[2] != 1 or not untouched() or not prefers(query, keys, values, features):
            return None
        if recent:
            recent_values: Any = self.values
            key, value = torch.cat([recent_keys, key], 2), torch.cat([recent_values, value], 2)
        attended = decode(query, keys, values, (key, value), **features)
        self.keys, self.values, self.cumulative_length = key, value, self.cumulative_length + 1
        return attended

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._of_rows(lambda one: one.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._of_rows(lambda one: one[indices.to(one.device)])

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError("a quantized cache cannot be cropped: its tokens are rounded in blocks; use a dynamic one")

    def _of_rows(self, change: Any) -> None:
        """Selects rows of the cached tokens: codes and scales are per token, so nothing is quantized again."""
        if not self.is_initialized:
            return
        pending, self._pending_beam_idx = self._pending_beam_idx, None
        for name in ("_quantized_keys", "_quantized_values"):
            codes = getattr(self, name)
            order = torch.arange(codes.shape[:-1].numel()).reshape(codes.shape[:-1])
            order = change(order if pending is None else order[pending.cpu()])
            flat = order.reshape(-1).to(codes.weight.data.device)
            weight = codes.weight
            zero = None if weight.zero is None else weight.zero[flat]
            picked = QuantizedWeight(
                weight.data[flat], weight.scale[flat], zero, weight.format, (len(flat), weight.shape[1]),
                weight.group_size,
            )  # fmt: skip
            setattr(self, name, _Codes(picked, torch.Size((*order.shape, codes.shape[-1])), codes.dtype))
        if self.keys is not None and self.values is not None and self.keys.numel() > 0:
            self.keys, self.values = change(self.keys), change(self.values)
