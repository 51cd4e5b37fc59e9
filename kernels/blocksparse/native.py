"""The definition of block-sparse attention: kernels/attention/native.py under the mask that the structure implies."""

from __future__ import annotations

from typing import Any

import torch

from easytorch.kernels.attention import contract as attention_contract
from easytorch.kernels.attention import native
from easytorch.kernels.blocksparse.contract import check_structure


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
    if mask is not None:  # checked before it is combined with what the structure hides
        attention_contract.resolve(query, key, value, mask=mask)
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
