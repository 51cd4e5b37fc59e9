"""Decoding attention as two batched matmuls per sequence, without a gradient: every feature, scores in float32.

Keys times queries, not queries times keys: a BLAS copies the operand that it is given transposed into its own order,
and here that would be the cache. Keys are taken in blocks: between two keys of a head in a (B, S, K, D) cache lie the
other heads, and over one block their addresses stay in the TLB (B8 K8 S4096 D128 float32: 12 ms instead of 40).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.attention.native import working_dtype

_BLOCK = 1024  # keys; fewer cost calls


def attend_products(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: AttentionCall,
    *,
    seen: Tensor | None,
) -> Tensor:
    """(B, 1, H, D), (B, S, K, D), (B, S, K, Dv) -> (B, 1, H, Dv) in the query's dtype; not differentiable.

    seen and the bias: four dimensions, broadcastable to (B, H, 1, S). Half precision is converted a block at a time.
    """
    batch, _, heads, dim = query.shape
    keys, kv_heads, value_dim = key.shape[1], key.shape[2], value.shape[3]
    working = working_dtype(query)
    queries = (query.to(working) * call.scale).reshape(batch, kv_heads, heads // kv_heads, dim).transpose(2, 3)
    scores = queries.new_empty(kv_heads, keys, heads // kv_heads)
    output = queries.new_empty(batch, kv_heads, heads // kv_heads, value_dim)
    for b in range(batch):
        for start, end, block in _blocks(key[b], working):
            torch.bmm(block, queries[b], out=scores[:, start:end])
        weights = _weights(scores.transpose(1, 2), _row(seen, b, kv_heads), _row(call.bias, b, kv_heads), call)
        if value.dtype == working:  # weights times values need no blocks: no operand is transposed
            torch.bmm(weights, value[b].transpose(0, 1), out=output[b])
            continue
        for start, end, block in _blocks(value[b], working):
            beta = 0 if start == 0 else 1
            torch.baddbmm(output[b], weights[:, :, start:end], block, beta=beta, out=output[b])
    return output.reshape(batch, 1, heads, value_dim).to(query.dtype)


def _blocks(tensor: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, int, Tensor]]:
    """(S, K, D) -> start, end and (K, end - start, D) in `dtype`, valid until the next one."""
    keys = tensor.shape[0]
    converted = None if tensor.dtype == dtype else tensor.new_empty(min(keys, _BLOCK), *tensor.shape[1:], dtype=dtype)
    for start in range(0, keys, _BLOCK):
        end = min(start + _BLOCK, keys)
        block = tensor[start:end]
        if converted is not None:
            block = converted[: end - start].copy_(block)
        yield start, end, block.transpose(0, 1)


def _weights(scores: Tensor, seen: Tensor | None, bias: Tensor | None, call: AttentionCall) -> Tensor:
    """(K, G, S), which may be overwritten -> (K, G, S). A row that sees nothing has weights of zero.

    seen, bias: those of the sequence.
    """
    softcap, sinks = call.softcap, call.sinks
    keys = scores.shape[-1]
    scores = scores.contiguous()
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if bias is not None:
        scores.add_(bias)
    if seen is not None:
        scores.masked_fill_(~seen, float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype).reshape(*scores.shape[:2], 1)
        return torch._safe_softmax(torch.cat([scores, column], dim=-1), -1)[..., :keys]
    if bias is None and seen is None:
        return scores.softmax(-1)
    return torch._safe_softmax(scores, -1)


def _row(tensor: Tensor | None, b: int, kv_heads: int) -> Tensor | None:
    """(1 | B, 1 | H, 1, 1 | S) -> (1 | K, 1 | G, 1 | S) of sequence b."""
    if tensor is None:
        return None
    row = tensor[b if tensor.shape[0] > 1 else 0]
    return row.reshape(kv_heads if row.shape[0] > 1 else 1, -1, row.shape[-1])
