"""Attention over pages in Triton, for CUDA (compute capability 8.0 and later) and ROCm; native.py defines it.

Nothing here imports Triton until a kernel is launched, and nothing synchronizes with the device: the values of the
integer tensors are not checked, and the kernels read nothing outside of their tensors whatever those are. With
TRITON_INTERPRET=1 set before the first launch the kernels run on CPU tensors, whose values are checked.
"""

from __future__ import annotations

from typing import Any

import torch

from easytorch.kernels.attention.call import AttentionCall, flatten, schema, unflatten
from easytorch.kernels.interop.torch_func import eager
from easytorch.kernels.interop.triton_devices import TOO_OLD, architecture_of, processors, refusal
from easytorch.kernels.ragged_page.contract import cut_to, read_sequences, resolve
from easytorch.kernels.ragged_page.triton_tuning import MAX_HEAD_DIM, splits_of, tiles_of


def supports(device: torch.device, dtype: torch.dtype, dim: int, value_dim: int) -> str | None:
    """None when the kernels take tensors of this device and dtype and these head_dims, else the reason."""
    for name, width in (("query and key", dim), ("value", value_dim)):
        if not 1 <= width <= MAX_HEAD_DIM:
            return f"the head_dim of {name} must be in 1..{MAX_HEAD_DIM}, got {width}"
    return refusal(device, dtype)


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
    """(N, H, D), (P, page_size, K, D), (P, page_size, K, Dv) -> (N, H, Dv); see contract.py. It has no backward.

    float32, float16, bfloat16; scores and sums are float32. Raises `ValueError` for shapes that do not fit and for what
    `supports` refuses.
    """
    tables = (context_lens, block_tables, query_start_loc, num_seqs)
    call = resolve(query, key_pages, value_pages, *tables, **features)
    reason = supports(query.device, query.dtype, query.shape[2], value_pages.shape[3])
    if reason is not None:
        raise ValueError(f"triton ragged_page: {reason}")
    return over_pages(query, None, key_pages, None, value_pages, cut_to(num_seqs, *tables[:3]), call)


def over_pages(
    query: torch.Tensor, tail_query: torch.Tensor | None, key: torch.Tensor, tail_key: torch.Tensor | None,
    value: torch.Tensor | None, tables: tuple[torch.Tensor | None, ...], call: AttentionCall,
    splits: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """query (N, H, D) and key (P, page_size, K, D), where given, the tails (N, H, DT) and (P, page_size, K, DT) are
    further features of each; value None: the values are `key`. splits: of each sequence's keys; None chooses."""
    if query.is_cpu and eager():
        read: Any = read_sequences  # `tables` are its arguments in their order
        read(query.shape[0], key.shape[0], key.shape[1], *tables, call.left)
    return forward(query, tail_query, key, tail_key, value, *tables, *flatten(call), splits)


@torch.library.custom_op(
    "easytorch::triton_ragged_page", mutates_args=(),
    schema="(Tensor query, Tensor? tail_query, Tensor key, Tensor? tail_key, Tensor? value, Tensor context_lens, "
    f"Tensor block_tables, Tensor query_start_loc, Tensor? num_seqs, {schema()}, SymInt? splits) -> Tensor",
)  # fmt: skip
def forward(
    query: torch.Tensor, tail_query: torch.Tensor | None, key: torch.Tensor, tail_key: torch.Tensor | None,
    value: torch.Tensor | None, context_lens: torch.Tensor, block_tables: torch.Tensor, query_start_loc: torch.Tensor,
    num_seqs: torch.Tensor | None, *rest: Any,
) -> torch.Tensor:  # fmt: skip
    """`over_pages` as an operator."""
    from easytorch.kernels.ragged_page import triton_calls as calls

    architecture = architecture_of(query.device)
    if architecture is None:
        raise ValueError(f"triton ragged_page: {TOO_OLD}")
    pages = calls.Pages(key, tail_key, value, context_lens, _adjacent(block_tables), query_start_loc, num_seqs)
    call, splits = unflatten(rest[:-1]), rest[-1]
    output = _fake(query, tail_query, key, tail_key, value)
    if splits is None:
        splits = _splits(architecture, query, key, output.shape[2], block_tables, call)
    if splits == 1:
        calls.forward_call(architecture, query, tail_query, pages, output, None, call).launch()
        return output
    tokens, heads, value_dim = output.shape
    partial = torch.empty((tokens, heads, splits, value_dim), dtype=torch.float32, device=query.device)
    lse = torch.empty((tokens, heads, 2, splits), dtype=torch.float32, device=query.device)
    calls.forward_call(architecture, query, tail_query, pages, partial, lse, call).launch()
    calls.merge_call(partial, lse, output).launch()
    return output


@forward.register_fake
def _fake(
    query: torch.Tensor, tail_query: torch.Tensor | None, key: torch.Tensor, tail_key: torch.Tensor | None,
    value: torch.Tensor | None, *rest: Any,
) -> torch.Tensor:  # fmt: skip
    width = (key if value is None else value).shape[3]
    return torch.empty((*query.shape[:2], width), dtype=query.dtype, device=query.device)


def _splits(
    architecture: str, query: torch.Tensor, key: torch.Tensor, value_dim: int, block_tables: torch.Tensor,
    call: AttentionCall,
) -> int:  # fmt: skip
    """Splits the keys for a batch with few rows; only shapes are known, so every sequence is assumed to have rows."""
    tokens, heads, dim = query.shape
    kv_heads, batch = key.shape[2], block_tables.shape[0]
    tiles = tiles_of(architecture, query.dtype, max(dim, value_dim), decode=tokens <= batch)
    group = heads // kv_heads
    blocks = max(batch, tokens * min(group, tiles.block_m) // tiles.block_m)
    keys = block_tables.shape[1] * key.shape[1]
    if call.left is not None and call.right is not None:
        keys = min(keys, call.left + call.right + 1)
    return splits_of(blocks * kv_heads * -(-group // tiles.block_m), keys, processors(query.device))


def _adjacent(table: torch.Tensor) -> torch.Tensor:
    return table if table.stride(1) == 1 else table.contiguous()
