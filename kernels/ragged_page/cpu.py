"""Attention over pages by the C++ operator: pages are read where they lie, once for the heads and rows of a sequence.

cpu.cpp here, with the loops of decode (kernels/decode/cpu_attention*). Time divided by ATen's (grouped.py), one thread
of a loaded AMD EPYC (Zen 4), H 32 K 8 D 128, pages of 16:

    rows, keys of each sequence    bfloat16    float32    float16
    8 sequences of 1, 4096           0.21        0.25       0.08
    4 sequences of 4, 1024           0.30        0.35       0.11
    16, 1024                         0.82        1.07       0.35
    64, 1024                         1.03        1.23       0.97
    512, 2048                        0.97        1.41       1.46
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.attention import cpp_call
from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.cpu import inference, library
from easytorch.kernels.cpu.inference import DTYPES
from easytorch.kernels.ragged_page import grouped
from easytorch.kernels.ragged_page.contract import cut_to, read_sequences, resolve

# Query rows up to which a sequence is the operator's; the others of a call are ATen's.
MOST_ROWS = 16


def supports(dtype: torch.dtype, *tensors: Any) -> str | None:
    """None when `ragged_page_attention` carries a call in this dtype with these tensors, else the reason. It may build
    the library."""
    if dtype not in DTYPES:
        return inference.other_dtype(dtype)
    return inference.refusal(tensors)


def ragged_page_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    num_seqs: int | Tensor | None = None,
    **features: Any,
) -> Tensor:
    """(N, H, D), (P, page_size, K, D), (P, page_size, K, Dv) -> (N, H, Dv), in the query's dtype.

    Raises `ValueError` for what contract.py does not allow, the numbers in the integer tensors included, and
    `NotImplementedError` with the reason where `supports` gives one.
    """
    tables = (context_lens, block_tables, query_start_loc, num_seqs)
    call = resolve(query, key_pages, value_pages, *tables, **features)
    if (reason := supports(query.dtype, query, key_pages, value_pages, *tables, call.sinks)) is not None:
        raise NotImplementedError(reason)
    return over_pages(query, key_pages, value_pages, *tables, call)


def over_pages(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    num_seqs: int | Tensor | None,
    call: AttentionCall,
    *,
    most_rows: int = MOST_ROWS,
    level: int = library.BEST,
) -> Tensor:
    """`ragged_page_attention` of a resolved call that `supports` accepts; level: see library.LEVELS."""
    count = int(num_seqs) if isinstance(num_seqs, Tensor) else num_seqs
    page_count, page_size = key_pages.shape[:2]
    # the operator checks the numbers again as it reads them; this says which of them is wrong
    sequences = read_sequences(
        query.shape[0], page_count, page_size, context_lens, block_tables, query_start_loc, count, call.left
    )
    tables = cut_to(count, context_lens, block_tables, query_start_loc)[:3]
    output: Tensor = torch.ops.easytorch_cpu.ragged_page.default(
        query,
        inference.last_dim_contiguous(key_pages),
        inference.last_dim_contiguous(value_pages),
        *tables,
        None,
        None,
        1,
        *cpp_call.arguments(call),
        most_rows,
        level,
    )
    for s in sequences:
        if s.last - s.first > most_rows:
            output[s.first : s.last] = grouped.prefill(query, key_pages, value_pages, block_tables, s, call)
    return output
