"""The definition of attention over pages, in plain torch: each sequence's pages gathered, then the definition of
attention. See contract.py."""

from __future__ import annotations

import torch

from easytorch.kernels.attention import native
from easytorch.kernels.attention.contract import band_of
from easytorch.kernels.ragged_page.contract import Window, check_call, read_sequences


def ragged_page_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_seqs: int | torch.Tensor | None = None,
    *,
    causal: bool = True,
    sliding_window: Window = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    softmax_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """(N, H, D), (P, page_size, K, D), (P, page_size, K, Dv) -> (N, H, Dv), in the query's dtype.

    Scores and softmax are computed in `softmax_dtype`: float32 by default, float64 for float64 inputs.
    Raises `ValueError` for what contract.py does not allow, the numbers in the integer tensors included.
    """
    check_call(
        query, key_pages, value_pages, context_lens, block_tables, query_start_loc, num_seqs, softcap=softcap,
        sinks=sinks, sliding_window=sliding_window,
    )  # fmt: skip
    left, _ = band_of(causal, sliding_window)
    page_count, page_size = key_pages.shape[:2]
    sequences = read_sequences(
        query.shape[0], page_count, page_size, context_lens, block_tables, query_start_loc, num_seqs, left
    )
    outputs = []
    for sequence in sequences:
        pages = block_tables[sequence.row, sequence.page : sequence.page + sequence.pages]
        keys, values = (pool[pages].flatten(0, 1)[: sequence.keys] for pool in (key_pages, value_pages))
        output, _ = native.attention(
            query[None, sequence.first : sequence.last], keys[None], values[None], causal=causal,
            sliding_window=sliding_window, softcap=softcap, sinks=sinks, softmax_scale=softmax_scale,
            softmax_dtype=softmax_dtype,
        )  # fmt: skip
        outputs.append(output[0])
    owned = sequences[-1].last if sequences else 0
    rest = query.new_zeros(query.shape[0] - owned, query.shape[1], value_pages.shape[3])
    return torch.cat([*outputs, rest])
