"""Latent attention over pages by the C++ operator (cpu_pages.cpp): one call for the sequences of few query rows.

The loops are those of cpu.py: a latent is read where it lies, once for all heads and rows of a block. Time divided by
ATen's (paged.py, a sequence after another), one thread of a loaded Intel Xeon (Emerald Rapids, AVX-512 without dot
products of bfloat16), L512 R64 Dn128 Dv128, pages of 16:

    sequences, rows, keys of each, heads    float32    bfloat16    float16
    8, 1, 1024, 16                            0.41       0.12        0.20
    8, 1, 4096, 16                            0.44       0.16        0.29
    4, 1, 1024, 128                           0.65       0.14        0.28
    4, 4, 1024, 16                            0.59       0.28        0.24
    1, 16, 1024, 16                           0.95       0.44        0.28
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.attention import cpp_call
from easytorch.kernels.cpu import inference, library, processor
from easytorch.kernels.cpu.inference import DTYPES, last_dim_contiguous
from easytorch.kernels.multi_latent import paged
from easytorch.kernels.multi_latent.cpu import MOST_QUERIES
from easytorch.kernels.multi_latent.paged import PagedCall, Pages
from easytorch.kernels.ragged_page.contract import cut_to, read_sequences

# Query rows up to which a sequence is the operator's; the others of a call are ATen's.
MOST_ROWS = 16


def supports(
    dtype: torch.dtype, query: Tensor, query_rope: Tensor, latent_pages: Pages, *others: Any
) -> str | None:  # fmt: skip
    """None when `ragged_page_multi_latent_attention` takes a call in this dtype with these tensors, else the reason.

    others: its other tensors. It may build the library.
    """
    if dtype not in DTYPES:
        return inference.other_dtype(dtype)
    pools = paged.split_pages(latent_pages, query_rope.shape[-1])
    if pools[0].shape[-1] == 0:
        return "it takes latents of at least one number"
    return inference.refusal((query, query_rope, *pools, *others))


def prefers(query: Tensor, query_rope: Tensor, latent_pages: Pages, *others: Any, **features: Any) -> bool:
    """True where the operator is faster than ATen and takes this call. It may build the library."""
    if not query.is_cpu or query.dim() != 3 or not processor.AVX512:  # where it was measured
        return False
    if query.dtype == torch.bfloat16 and query.shape[1] > MOST_QUERIES.get(torch.bfloat16, query.shape[1]):
        return False
    return supports(query.dtype, query, query_rope, latent_pages, *others, *features.values()) is None


def ragged_page_multi_latent_attention(
    query: Tensor, query_rope: Tensor, latent_pages: Pages, context_lens: Tensor, block_tables: Tensor,
    query_start_loc: Tensor, num_seqs: int | Tensor | None = None, up_key: Tensor | None = None,
    up_value: Tensor | None = None, **features: Any,
) -> Tensor:  # fmt: skip
    """-> (N, H, Dv), or (N, H, L) without `up_value`; paged.py says the rest.

    Raises `NotImplementedError` with the reason where `supports` gives one.
    """
    given = (query, query_rope, latent_pages, context_lens, block_tables, query_start_loc, num_seqs, up_key, up_value)
    call = paged.resolve(*given, features)
    if (reason := supports(query.dtype, *given, call.call.sinks)) is not None:
        raise NotImplementedError(f"ragged_page_multi_latent_attention: {reason}")
    return over_pages(query, query_rope, call, up_key, up_value)


def over_pages(
    query: Tensor, query_rope: Tensor, given: PagedCall, up_key: Tensor | None, up_value: Tensor | None,
    *, most_rows: int = MOST_ROWS, level: int = library.BEST,
) -> Tensor:  # fmt: skip
    """`ragged_page_multi_latent_attention` of a resolved call that `supports` accepts; level: see library.LEVELS."""
    *integers, num_seqs = given.tables
    count = int(num_seqs) if isinstance(num_seqs, Tensor) else num_seqs
    page_count, page_size = given.latent.shape[:2]
    context_lens, block_tables, query_start_loc = integers
    # the operator checks the numbers again as it reads them; this says which of them is wrong
    sequences = read_sequences(
        query.shape[0], page_count, page_size, context_lens, block_tables, query_start_loc, count, given.call.left
    )
    output: Tensor = torch.ops.easytorch_cpu.multi_latent_pages.default(
        query,
        query_rope,
        last_dim_contiguous(given.latent),
        last_dim_contiguous(given.rope),
        *cut_to(count, context_lens, block_tables, query_start_loc)[:3],
        None if up_key is None else last_dim_contiguous(up_key),
        None if up_value is None else last_dim_contiguous(up_value),
        *cpp_call.arguments(given.call),
        most_rows,
        level,
    )
    for s in sequences:
        if s.last - s.first > most_rows:
            rows = slice(s.first, s.last)
            output[rows] = paged.by_plan(query[rows], query_rope[rows], given, s, up_key, up_value)
    return output
