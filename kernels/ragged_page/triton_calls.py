"""Launches of the paged kernels: arguments and grid. Imports Triton."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.interop.triton_call import Call, adjacent, power_of_two
from easytorch.kernels.ragged_page.triton_kernels import merge_splits, ragged_forward
from easytorch.kernels.ragged_page.triton_tuning import tiles_of

_LOG2E = math.log2(math.e)


class Pages(NamedTuple):
    """The pools of pages and the metadata of a batch. key (P, page_size, K, D), tail_key (P, page_size, K, DT) or None:
    further features of each key; value (P, page_size, K, DV), or None where the values are `key`."""

    key: torch.Tensor
    tail_key: torch.Tensor | None
    value: torch.Tensor | None
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    query_start_loc: torch.Tensor
    num_seqs: torch.Tensor | None


def heads_of_program(group: int, block_m: int) -> int:
    """How many of the `group` query heads of a key/value head one program takes."""
    return min(group, block_m)


def forward_call(
    architecture: str,
    query: torch.Tensor,
    tail_query: torch.Tensor | None,
    pages: Pages,
    output: torch.Tensor,
    lse: torch.Tensor | None,
    call: AttentionCall,
) -> Call:
    """Fills output (N, H, DV), or the partial (N, H, splits, DV) with lse (N, H, 2, splits), float32 both."""
    tokens, heads, dim = query.shape
    kv_heads, value_dim, batch = pages.key.shape[2], output.shape[-1], pages.context_lens.shape[0]
    tiles = tiles_of(architecture, query.dtype, max(dim, value_dim), decode=tokens <= batch)
    group = heads // kv_heads
    per_program = heads_of_program(group, tiles.block_m)
    splits = 1 if lse is None else lse.shape[3]
    softcap, scale = call.softcap, call.scale
    exact = query.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest" or torch.version.hip
    page = pages.key.shape[1] if pages.block_tables.shape[1] > 1 else 0  # 0: one page per sequence, of any size
    tail_dim = 0 if tail_query is None else tail_query.shape[2]
    arguments: dict[str, Any] = {
        "query": query, "tail_query": tail_query, "key": pages.key, "tail_key": pages.tail_key, "value": pages.value,
        "output": output, "lse": lse, "sinks": adjacent(call.sinks),
        "context_lens": pages.context_lens.contiguous(), "block_tables": pages.block_tables,
        "query_start_loc": pages.query_start_loc.contiguous(), "num_seqs": pages.num_seqs,
        "query_strides": query.stride(), "tail_query_strides": _strides(tail_query),
        "key_strides": pages.key.stride(), "tail_key_strides": _strides(pages.tail_key),
        "value_strides": _strides(pages.value), "table_stride": pages.block_tables.stride(0),
        "capacity": _capacity(pages), "last_page": pages.key.shape[0] - 1,
        "B": batch, "N": tokens, "H": heads, "left": call.left, "right": call.right,
        "scale": scale * _LOG2E if softcap is None else scale / softcap,
        "cap": None if softcap is None else softcap * _LOG2E,
        "GROUP": group, "HEADS": per_program, "PAGE": page, "D": dim, "DT": tail_dim, "DV": value_dim,
        "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "BLOCK_D": power_of_two(dim),
        "BLOCK_DT": power_of_two(tail_dim), "BLOCK_DV": power_of_two(value_dim),
        "PRECISION": "ieee" if exact else "tf32", "SPLITS": splits,
    }  # fmt: skip
    # each sequence starts a new block, and so do the rows after the last one
    blocks = tokens // (tiles.block_m // per_program) + batch + 1
    programs = blocks * splits * kv_heads * -(-group // per_program) if tokens else 0
    return Call(ragged_forward, programs, arguments, tiles.num_warps, tiles.num_stages)


def merge_call(partial: torch.Tensor, lse: torch.Tensor, output: torch.Tensor) -> Call:
    """partial (N, H, splits, DV), lse (N, H, 2, splits) -> fills output (N, H, DV)."""
    splits, value_dim = partial.shape[2:]
    arguments = {
        "partial": partial, "lse": lse, "output": output, "DV": value_dim, "BLOCK_DV": power_of_two(value_dim),
        "SPLITS": splits,
    }  # fmt: skip
    return Call(merge_splits, lse.shape[0] * lse.shape[1], arguments)


def _capacity(pages: Pages) -> int:
    """The most keys of a sequence: those of a row of block_tables, and none where there is no page."""
    return min(pages.block_tables.shape[1] * pages.key.shape[1], 2**31 - 1) if pages.key.shape[0] else 0


def _strides(tensor: torch.Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tensor.stride()


def typical_calls(dtype: torch.dtype, architecture: str) -> Iterator[tuple[str, Call]]:
    """Decode and prefill over pages of 16, 32 query heads on 8: with and without split keys, and with every feature."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    lens, tables, starts = (empty(*shape, dtype=torch.int32) for shape in ((64,), (64, 256), (65,)))
    for dim, tokens in ((128, 64), (128, 4096), (256, 4096)):
        query, key = empty(tokens, 32, dim), empty(4096, 16, 8, dim)
        pages = Pages(key, None, key, lens, tables, starts, None)
        name = f"{'decode' if tokens == 64 else 'prefill'}_{dim}"
        if tokens > 64:
            yield name, forward_call(architecture, query, None, pages, query, None, AttentionCall(right=0))
            continue
        partial, lse = (empty(tokens, 32, *shape, dtype=torch.float32) for shape in ((8, dim), (2, 8)))
        yield f"{name}_split", forward_call(architecture, query, None, pages, partial, lse, AttentionCall(right=0))
        yield "merge", merge_call(partial, lse, query)
        everything = AttentionCall(left=1023, right=0, softcap=30.0, sinks=empty(32))
        pages = pages._replace(num_seqs=empty(1, dtype=torch.int32))
        yield f"{name}_everything", forward_call(architecture, query, None, pages, query, None, everything)
