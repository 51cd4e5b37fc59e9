"""The definition of block-sparse attention: kernels/attention/native.py under the mask that the structure implies.

Beyond the contract of kernels/attention/contract.py, with p = i + S - T the key aligned with query i:

    chunk_size      query i sees key j only where j // chunk_size == p // chunk_size (Llama 4's chunked attention)
    prefix_length   causal does not hide keys j < prefix_length (prefix-LM, https://arxiv.org/abs/1910.10683, fig. 4);
                    an int, or (B,) integers; mask, sliding window, chunks and segments apply to them all the same
"""

from __future__ import annotations

from typing import Any

import torch

from easytorch.kernels.attention import contract as attention_contract
from easytorch.kernels.attention import native
from easytorch.kernels.interop.arguments import bounds, check_integer, check_tensors


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    chunk_size: int | None = None,
    prefix_length: int | torch.Tensor | None = None,
    **features: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T, H, D), (B, S, K, D), (B, S, K, Dv) -> output (B, T, H, Dv), weights (B, H, T, S), in the query's dtype.

    `features` are the other arguments of kernels/attention/native.py.
    """
    length, keys = attention_contract.check_tensors(query, key, value)[1:3]
    check_structure(query, chunk_size, prefix_length)
    column = torch.arange(keys, device=query.device)
    own = torch.arange(length, device=query.device)[:, None] + keys - length
    parts = [] if mask is None else [mask]
    if chunk_size is not None:
        parts.append(column // chunk_size == own // chunk_size)
    if causal and prefix_length is not None:
        prefix = torch.as_tensor(prefix_length, device=query.device).reshape(-1, 1, 1, 1)
        parts.append((column <= own) | (column < prefix))
        causal = False
    seen: torch.Tensor | None = None
    for part in parts:
        seen = part if seen is None else seen & part
    return native.attention(query, key, value, mask=seen, causal=causal, **features)


def check_structure(query: torch.Tensor, chunk_size: int | None, prefix_length: int | torch.Tensor | None) -> None:
    """An error where `chunk_size` or `prefix_length` does not fit the call."""
    check_integer("attention", "chunk_size", chunk_size)
    if not isinstance(prefix_length, torch.Tensor):
        check_integer("attention", "prefix_length", prefix_length)
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"attention: chunk_size must be at least 1, got {chunk_size}; None means no chunks")
    if isinstance(prefix_length, torch.Tensor):
        if prefix_length.device.type != "cpu":  # lengths counted on the CPU are moved to the query
            check_tensors("attention", query=query, prefix_length=prefix_length)
        integers = prefix_length.dtype in (torch.int32, torch.int64)
        if not integers or prefix_length.shape not in ((), (query.shape[0],)):
            raise ValueError(
                f"attention: prefix_length must be an int or integers ({query.shape[0]},), got "
                f"{prefix_length.dtype} {tuple(prefix_length.shape)}"
            )
        limits = bounds(prefix_length)
        if limits is not None and limits[0] < 0:
            raise ValueError(f"attention: prefix_length must not be negative, got {prefix_length.tolist()}")
    elif prefix_length is not None and prefix_length < 0:
        raise ValueError(f"attention: prefix_length must be at least 0, got {prefix_length}; None means no prefix")
