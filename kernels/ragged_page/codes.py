"""Attention over pages of one byte a number, int8 or float8 with scales: the definition, and the C++ operator.

The arguments are those of contract.py, with key_pages (P, page_size, K, D) and value_pages as `Codes`
(kernels/decode/codes.py): number d of a slot and head is code * scale[..., d // group_size], rounded to the
query's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.attention import cpp_call
from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.cpu import library
from easytorch.kernels.cpu.inference import last_dim_contiguous
from easytorch.kernels.decode import codes
from easytorch.kernels.decode.codes import Codes
from easytorch.kernels.ragged_page import contract, grouped, native
from easytorch.kernels.ragged_page.contract import Sequence, cut_to, read_sequences
from easytorch.kernels.ragged_page.cpu import MOST_ROWS

Tables = tuple[Tensor, Tensor, Tensor, int | Tensor | None]


def supports(query: Tensor, key_pages: Codes, value_pages: Codes, features: Mapping[str, Any]) -> str | None:
    """None when `ragged_page_attention` carries this call, else the reason. Asking may build the library."""
    return codes.supports(query, key_pages, value_pages, features)


def ragged_page_attention(
    query: Tensor,
    key_pages: Codes,
    value_pages: Codes,
    context_lens: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    num_seqs: int | Tensor | None = None,
    **features: Any,
) -> Tensor:
    """query (N, H, D), pages of codes, tables as in contract.py -> (N, H, Dv), in the query's dtype.

    No decoded copy of the pages is made but for sequences of more than `MOST_ROWS` query rows, one at a time.
    Raises `ValueError` for what does not fit, the numbers in the integer tensors included, and `NotImplementedError`
    with the reason where `supports` gives one.
    """
    tables = (context_lens, block_tables, query_start_loc, num_seqs)
    call = resolve(query, key_pages, value_pages, tables, features)
    if (reason := supports(query, key_pages, value_pages, features)) is not None:
        raise NotImplementedError(f"ragged_page: {reason}")
    return over_pages(query, key_pages, value_pages, tables, call)


def define(query: Tensor, key_pages: Codes, value_pages: Codes, *tables: Any, **features: Any) -> Tensor:
    """The definition: native.py over the decoded pages."""
    keys, values = (pages.decoded(query.dtype) for pages in (key_pages, value_pages))
    return native.ragged_page_attention(query, keys, values, *tables, **features)


def resolve(
    query: Tensor, key_pages: Codes, value_pages: Codes, tables: Tables, features: Mapping[str, Any]
) -> AttentionCall:  # fmt: skip
    """The call as one record, or an error where shapes or dtypes do not fit; reads no tensor's values."""
    codes.check_scales("ragged_page", key_pages, value_pages)
    keys, values = (query.new_empty(1).expand(pages.data.shape) for pages in (key_pages, value_pages))
    return contract.resolve(query, keys, values, *tables, **features)


def over_pages(
    query: Tensor, key_pages: Codes, value_pages: Codes, tables: Tables, call: AttentionCall,
    *, most_rows: int = MOST_ROWS, level: int = library.BEST,
) -> Tensor:  # fmt: skip
    """`ragged_page_attention` of a resolved call that `supports` accepts; level: see library.LEVELS."""
    *integers, num_seqs = tables
    count = int(num_seqs) if isinstance(num_seqs, Tensor) else num_seqs
    page_count, page_size = key_pages.data.shape[:2]
    context_lens, block_tables, query_start_loc = integers
    sequences = read_sequences(
        query.shape[0], page_count, page_size, context_lens, block_tables, query_start_loc, count, call.left
    )
    output: Tensor = torch.ops.easytorch_cpu.ragged_page.default(
        query,
        last_dim_contiguous(key_pages.data),
        last_dim_contiguous(value_pages.data),
        *cut_to(count, context_lens, block_tables, query_start_loc)[:3],
        last_dim_contiguous(key_pages.scale),
        last_dim_contiguous(value_pages.scale),
        key_pages.group_size,
        *cpp_call.arguments(call),
        most_rows,
        level,
    )
    for s in sequences:
        if s.last - s.first > most_rows:
            output[s.first : s.last] = _prefill(query, key_pages, value_pages, block_tables, s, call)
    return output


def _prefill(
    query: Tensor, key_pages: Codes, value_pages: Codes, block_tables: Tensor, s: Sequence, call: AttentionCall
) -> Tensor:
    """One sequence by ATen, over its own pages, decoded."""
    own = block_tables[s.row, s.page : s.page + s.pages].long()
    keys, values = (
        Codes(pages.data[own], pages.scale[own], pages.group_size).decoded(query.dtype)
        for pages in (key_pages, value_pages)
    )
    table = torch.arange(s.pages)[None]
    return grouped.prefill(query, keys, values, table, s._replace(row=0, page=0), call)
