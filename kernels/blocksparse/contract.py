"""The arguments of block-sparse attention: those of kernels/attention/contract.py, and two that shape the structure.

With p = i + S - T the key aligned with query i:

    chunk_size      query i sees key j only where j // chunk_size == p // chunk_size (Llama 4's chunked attention)
    prefix_length   causal does not hide keys j < prefix_length (prefix-LM, https://arxiv.org/abs/1910.10683, fig. 4);
                    an int, or (B,) integers; mask, sliding window, chunks and segments apply to them all the same
"""

from __future__ import annotations

from typing import Any

import torch

from easytorch.kernels.attention import contract
from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.attention.contract import window_of
from easytorch.kernels.blocksparse.structure import Rule
from easytorch.kernels.interop.arguments import bounds, check_int64, check_tensors


def resolve(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool = False,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    chunk_size: int | None = None,
    prefix_length: int | torch.Tensor | None = None,
    **features: Any,
) -> tuple[AttentionCall, Rule]:
    """The call as one record without a band, which the rule says: a prefix widens causal and no window.

    `ValueError` or `TypeError` for what does not fit.
    """
    call = contract.resolve(query, key, value, causal=causal, sliding_window=sliding_window, **features)
    check_structure(query, chunk_size, prefix_length)
    rule = Rule(causal, *window_of(sliding_window), chunk_size, prefix_length)
    return call._replace(left=None, right=None), rule


def check_structure(query: torch.Tensor, chunk_size: int | None, prefix_length: int | torch.Tensor | None) -> None:
    """An error where `chunk_size` or `prefix_length` does not fit the call."""
    check_int64("attention", "chunk_size", chunk_size)
    if not isinstance(prefix_length, torch.Tensor):
        check_int64("attention", "prefix_length", prefix_length)
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
