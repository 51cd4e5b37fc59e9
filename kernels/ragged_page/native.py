"""The definition of attention over pages, in plain torch: each sequence's pages gathered, then the definition of
attention. See contract.py."""

from __future__ import annotations

from typing import Any

import torch

from easytorch.kernels.attention import native
from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.ragged_page.contract import read_sequences, resolve


def ragged_page_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_seqs: int | torch.Tensor | None = None,
    *,
    softmax_dtype: torch.dtype | None = None,
    **features: Any,
) -> torch.Tensor:
    """(N, H, D), (P, page_size, K, D), (P, page_size, K, Dv) -> (N, H, Dv), in the query's dtype.

    Scores and softmax are computed in `softmax_dtype`: float32 by default, float64 for float64 inputs.
    Raises `ValueError` for what contract.py does not allow, the numbers in the integer tensors included.
    """
    tables = (context_lens, block_tables, query_start_loc, num_seqs)
    call = resolve(query, key_pages, value_pages, *tables, **features)
    return over_pages(query, key_pages, value_pages, *tables, call, softmax_dtype)


def over_pages(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_seqs: int | torch.Tensor | None,
    call: AttentionCall,
    softmax_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`ragged_page_attention` of a resolved call."""
    page_count, page_size = key_pages.shape[:2]
    sequences = read_sequences(
        query.shape[0], page_count, page_size, context_lens, block_tables, query_start_loc, num_seqs, call.left
    )
    outputs = []
    for sequence in sequences:
        pages = block_tables[sequence.row, sequence.page : sequence.page + sequence.pages]
        keys, values = (pool[pages].flatten(0, 1)[: sequence.keys] for pool in (key_pages, value_pages))
        rows = query[None, sequence.first : sequence.last]
        output, _ = native.define(rows, keys[None], values[None], call, softmax_dtype)
        outputs.append(output[0])
    owned = sequences[-1].last if sequences else 0
    rest = query.new_zeros(query.shape[0] - owned, query.shape[1], value_pages.shape[3])
    return torch.cat([*outputs, rest])
