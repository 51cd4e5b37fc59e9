"""The launches of block-sparse attention: kernels, arguments, lists and grids.

Reads shapes, strides and dtypes, and makes the lists with torch's own operators: tensors on the meta device do.
Imports Triton: import it inside the function that needs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.attention.triton_flash_calls import delta_call, shared_arguments, tile_arguments
from easytorch.kernels.attention.triton_tuning import tiles_of
from easytorch.kernels.blocksparse.block_map import Lists, lists_of, states, width_of
from easytorch.kernels.blocksparse.structure import Structure, structure_of
from easytorch.kernels.blocksparse.triton_backward_keys import blocksparse_key_value_grad
from easytorch.kernels.blocksparse.triton_backward_queries import blocksparse_query_grad
from easytorch.kernels.blocksparse.triton_forward import blocksparse_forward
from easytorch.kernels.interop.triton_call import Call, adjacent

Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def forward_call(
    architecture: str, given: Given, output: torch.Tensor, lse: torch.Tensor, structure: Structure, call: AttentionCall
) -> Call:
    """Fills output (B, T, H, Dv) and lse (B, H, 2, T) float32. given: query, key, value."""
    query, _, value = given
    tiles = tiles_of("forward", architecture, query, value, dense=call.dense)
    arguments = {
        **_common(given, structure, call, tiles, transposed=False), "output": output, "lse": lse,
        "sinks": adjacent(call.sinks), "output_strides": output.stride(),
    }  # fmt: skip
    programs = -(-query.shape[1] // tiles.block_m) * query.shape[2] * query.shape[0]
    return Call(blocksparse_forward, programs, arguments, tiles.num_warps, tiles.num_stages)


def key_value_grad_call(
    architecture: str, given: Given, output_grad: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor,
    key_grad: torch.Tensor, value_grad: torch.Tensor, structure: Structure, call: AttentionCall,
) -> Call:  # fmt: skip
    """Fills key_grad (B, S, K, D) and value_grad (B, S, K, Dv)."""
    query, key, value = given
    tiles = tiles_of("key_value_grad", architecture, query, value, dense=call.dense)
    arguments = {
        **_common(given, structure, call, tiles, transposed=True), "output_grad": output_grad, "lse": lse,
        "delta": delta, "key_grad": key_grad, "value_grad": value_grad, "grad_strides": output_grad.stride(),
        "key_grad_strides": key_grad.stride(), "value_grad_strides": value_grad.stride(),
        "softmax_scale": call.scale,
    }  # fmt: skip
    programs = -(-key.shape[1] // tiles.block_n) * key.shape[2] * key.shape[0]
    return Call(blocksparse_key_value_grad, programs, arguments, tiles.num_warps, tiles.num_stages)


def query_grad_call(
    architecture: str, given: Given, output_grad: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor,
    query_grad: torch.Tensor, bias_grad: torch.Tensor | None, structure: Structure, call: AttentionCall,
) -> Call:  # fmt: skip
    """Fills query_grad (B, T, H, D), and bias_grad (B, H, T, S) in the blocks that are seen."""
    query, _, value = given
    tiles = tiles_of("query_grad", architecture, query, value, dense=call.dense)
    arguments = {
        **_common(given, structure, call, tiles, transposed=False), "output_grad": output_grad, "lse": lse,
        "delta": delta, "query_grad": query_grad, "bias_grad": bias_grad, "grad_strides": output_grad.stride(),
        "query_grad_strides": query_grad.stride(),
        "bias_grad_strides": None if bias_grad is None else bias_grad.stride(), "softmax_scale": call.scale,
    }  # fmt: skip
    programs = -(-query.shape[1] // tiles.block_m) * query.shape[2] * query.shape[0]
    return Call(blocksparse_query_grad, programs, arguments, tiles.num_warps, tiles.num_stages)


def _common(given: Given, structure: Structure, call: AttentionCall, tiles: Any, *, transposed: bool) -> dict[str, Any]:
    """The arguments that every kernel takes; `transposed`: lists of query blocks for each block of keys."""
    query, key, value = given
    lists = _lists(structure, key.shape[1], call, tiles.block_m, tiles.block_n, transposed)
    arguments = {**shared_arguments(query, key, value, call), **tile_arguments(query, value, tiles)}
    del arguments["left"], arguments["right"]
    begin, end = structure.begin.contiguous(), structure.end.contiguous()
    many = lists.blocks.shape[0] > 1
    return {
        **arguments, "query": query, "key": key, "value": value, "begin": begin, "end": end,
        "interval_stride": begin.shape[1] if begin.shape[0] > 1 else 0,
        "index": lists.blocks, "partial": lists.partial, "total_blocks": lists.total,
        "index_strides": (
            lists.blocks.stride(0) if many else 0, lists.blocks.stride(1), lists.total.stride(0) if many else 0
        ),
    }  # fmt: skip


def _lists(structure: Structure, keys: int, call: AttentionCall, block_m: int, block_n: int, transposed: bool) -> Lists:
    mask = call.mask
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    state = states(
        structure, keys, block_m, block_n, mask=mask, query_ids=call.query_segment_ids, key_ids=call.key_segment_ids
    )
    if transposed:
        width = width_of(block_n, block_m, state.shape[1], (structure.right, structure.left))
        return lists_of(state.mT, width)
    return lists_of(state, width_of(block_m, block_n, state.shape[2], (structure.left, structure.right)))


def typical_calls(dtype: torch.dtype, architecture: str) -> Iterator[tuple[str, Call]]:
    """A causal training step with a window of 1024 and documents, and the same with every feature."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    for dim, everything in ((128, False), (64, True)):
        query, key = empty(2, 4096, 32, dim), empty(2, 4096, 8, dim)
        lse, delta = empty(2, 32, 2, 4096, dtype=torch.float32), empty(2, 32, 4096, dtype=torch.float32)
        ids = empty(2, 4096, dtype=torch.int64)
        structure = structure_of(4096, 4096, torch.device("meta"), causal=True, sliding_window=1024)
        call = AttentionCall(query_segment_ids=ids, key_segment_ids=ids, scale=dim**-0.5)
        bias_grad = None
        if everything:
            call = call._replace(
                bias=empty(1, 32, 4096, 4096, dtype=torch.float32), mask=empty(2, 1, 4096, 4096, dtype=torch.bool),
                sinks=empty(32), seed=empty(dtype=torch.int64), softcap=30.0, dropout_prob=0.1,
            )  # fmt: skip
            bias_grad = empty(2, 32, 4096, 4096, dtype=torch.float32)
        given = (query, key, key)
        name = "every feature" if everything else "documents"
        yield f"forward, {name}", forward_call(architecture, given, query, lse, structure, call)
        if not everything:
            yield "delta", delta_call(query, query, delta)
        yield (
            f"key_value_grad, {name}",
            key_value_grad_call(architecture, given, query, lse, delta, key, key, structure, call),
        )
        yield (
            f"query_grad, {name}",
            query_grad_call(architecture, given, query, lse, delta, query, bias_grad, structure, call),
        )
