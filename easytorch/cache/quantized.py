"""Quantized keys and values, except those of the last tokens (KIVI, arXiv:2402.02750)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import QuantizedLayer

from easytorch.kernels.quantized_matmul.weight import QuantizedWeight, quantize


class _Codes(NamedTuple):
    weight: QuantizedWeight
    shape: torch.Size
    dtype: torch.dtype


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
