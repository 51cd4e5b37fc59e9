"""Attention over pages by ATen: decoding sequences share calls, the others take one call each. See contract.py.

Pages are gathered for as many decoding sequences at once as fit the CPU's caches. The query heads of one key/value head
become the rows of one matrix, so each key is read once. Medians on 2 cores (EPYC), 8 sequences of 4096 keys, H 32 K 8 D
128, pages of 16, against one gather and one call of ATen with `enable_gqa`: 71 / 154 ms in float32, 53 / 320 ms in
bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from easytorch.kernels.attention import aten, aten_op, blocked
from easytorch.kernels.attention.aten_fused import fused
from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.attention.layout import readable
from easytorch.kernels.attention.native import attend, working_dtype
from easytorch.kernels.ragged_page.contract import Sequence, read_sequences, resolve

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionCall], torch.Tensor]

GATHERED_BYTES = 1 << 24  # bytes of keys and values in one call
# From this many scores of a sequence (heads x queries x keys) on, tiled batched products are faster than ATen's fused
# kernel: H32 K8 D128, 512 queries after 1536 keys, 119 / 136 ms in float32, 66 / 134 ms in bfloat16.
FLASH_SCORES = 1 << 20


def ragged_page_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_seqs: int | torch.Tensor | None = None,
    **features: Any,
) -> torch.Tensor:
    """(N, H, D), (P, page_size, K, D), (P, page_size, K, Dv) -> (N, H, Dv), in the query's dtype.

    Raises `ValueError` for what contract.py does not allow, the numbers in the integer tensors included.
    """
    tables = (context_lens, block_tables, query_start_loc, num_seqs)
    call = resolve(query, key_pages, value_pages, *tables, **features)
    return over_pages(query, key_pages, value_pages, *tables, call)


def over_pages(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_seqs: int | torch.Tensor | None,
    call: AttentionCall,
) -> torch.Tensor:
    """`ragged_page_attention` of a resolved call."""
    page_count, page_size = key_pages.shape[:2]
    sequences = read_sequences(
        query.shape[0], page_count, page_size, context_lens, block_tables, query_start_loc, num_seqs, call.left
    )
    outputs: list[torch.Tensor] = []
    places: list[int] = []  # rows of the query in the order of the outputs
    key_bytes = sum(pool[0, 0].numel() * pool.element_size() for pool in (key_pages, value_pages))
    for chunk in chunks_of([s for s in sequences if s.last - s.first == 1], page_size * key_bytes):
        rows = [s.first for s in chunk]
        tokens = query if rows == list(range(len(query))) else query[rows]
        outputs.append(decode(tokens, key_pages, value_pages, block_tables, chunk, call))
        places += rows
    for s in sequences:
        if s.last - s.first == 1:
            continue
        outputs.append(prefill(query, key_pages, value_pages, block_tables, s, call))
        places += range(s.first, s.last)
    if not outputs:
        return query.new_zeros(*query.shape[:2], value_pages.shape[3])
    # autocast returns some of them in its own dtype
    result = (torch.cat(outputs) if len(outputs) > 1 else outputs[0]).to(query.dtype)
    if places == list(range(len(query))):
        return result
    zeros = query.new_zeros(*query.shape[:2], value_pages.shape[3])
    return zeros.index_copy(0, torch.tensor(places, device=query.device), result)


def prefill(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    block_tables: torch.Tensor,
    sequence: Sequence,
    call: AttentionCall,
) -> torch.Tensor:
    """query (N, H, D) -> (rows, H, Dv), those of one sequence."""
    first, last, keys = sequence.first, sequence.last, sequence.keys
    pages = block_tables[sequence.row, sequence.page : sequence.page + sequence.pages]
    key, value = (pool.index_select(0, pages).flatten(0, 1)[None, :keys] for pool in (key_pages, value_pages))
    attend = _function_for(query, key_pages, (last - first) * keys, call)
    return attend(query[None, first:last], key, value, call)[0]


def _function_for(query: torch.Tensor, key_pages: torch.Tensor, pairs: int, call: AttentionCall) -> Attend:
    """The attention function for a sequence with this many scores."""
    heads, kv_heads = query.shape[1], key_pages.shape[2]
    # in float32 the gain is from folding the heads
    gains = query.dtype.itemsize == 2 or heads > kv_heads or not call.plain
    if heads * pairs >= FLASH_SCORES and gains:
        return aten_op.by_operator
    return _fused if call.plain else blocked.blockwise


def _fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    # is_causal where the window changes nothing: ATen skips tiles for it, but not for a mask
    band: dict[str, Any] = {"causal": True}
    if (call.left, call.right) != (None, 0):
        band = {"sliding_window": (call.left, call.right)}
    return aten.attention(query, key, value, softmax_scale=call.scale, **band)


def chunks_of(sequences: list[Sequence], page_bytes: int) -> list[list[Sequence]]:
    """Sequences of similar length together, as many as fit GATHERED_BYTES when padded to the longest; at least one."""
    chunks: list[list[Sequence]] = []
    for sequence in sorted(sequences, key=lambda s: s.pages, reverse=True):
        if not chunks or (len(chunks[-1]) + 1) * chunks[-1][0].pages * page_bytes > GATHERED_BYTES:
            chunks.append([])
        chunks[-1].append(sequence)
    return chunks


def decode(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    block_tables: torch.Tensor,
    sequences: list[Sequence],
    call: AttentionCall,
) -> torch.Tensor:
    """query (b, H, D), one token of each of the b sequences -> (b, H, Dv)."""
    batch, heads, dim = query.shape
    page_size, kv_heads = key_pages.shape[1:3]
    table = torch.tensor([(s.row, s.page, s.pages, s.keys) for s in sequences], device=query.device)
    index, page, pages, length = table.T.unsqueeze(-1)
    longest = max(s.pages for s in sequences)
    # past its end a sequence's last page is repeated; the mask hides it
    column = page + torch.minimum(torch.arange(longest, device=query.device), pages - 1)
    used = block_tables[index, column].flatten()
    keys, values = (
        pool.index_select(0, used).reshape(batch, longest * page_size, kv_heads, -1)
        for pool in (key_pages, value_pages)
    )
    seen = None
    left, right = call.left, call.right
    if left is not None or (right is not None and right < 0) or any(s.keys < longest * page_size for s in sequences):
        place = torch.arange(longest * page_size, device=query.device)
        seen = place < length
        # a slot that was never written may hold NaN
        unwritten = (~seen).flatten().nonzero()[:, 0]
        for gathered in (keys, values):
            gathered.flatten(0, 1).index_fill_(0, unwritten, 0.0)
        if left is not None:
            seen.logical_and_(place >= length - 1 - left)
        if right is not None and right < 0:
            seen.logical_and_(place <= length - 1 + right)
        seen = seen[:, None, None]
    if not call.plain:
        output, _ = attend(query[:, None], keys, values, call, seen=seen, keep=None, working=working_dtype(query))
        return output[:, 0]
    output = fused(
        readable(query.reshape(batch, kv_heads, heads // kv_heads, dim)), keys.transpose(1, 2), values.transpose(1, 2),
        attn_mask=seen, scale=call.scale,
    )  # fmt: skip
    return output.reshape(batch, heads, -1)
