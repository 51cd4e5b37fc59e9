"""Attention in tiles of ATen products and softmax on the CPU, memory linear in T, forward and backward: contract.py.

A tile spans every key that its rows may see, so the softmax is ATen's own vectorized one and needs no rescaling
afterwards; tiles end where the band or the documents end. Backward recomputes each tile, as in
FlashAttention-2, https://arxiv.org/abs/2307.08691.
"""

from __future__ import annotations

import torch
from torch import Tensor

from easytorch.kernels.attention.aten_flash_tiles import (
    blocks,
    chunks,
    keep_factor,
    key_rows,
    memory,
    part,
    put_key_rows,
    put_query_rows,
    query_rows,
    tile_of,
    tiling_of,
    weights,
)
from easytorch.kernels.attention.call import AttentionCall


def flash_forward(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
    """query (B, T, H, D), key (B, S, K, D), value (B, S, K, Dv) -> output (B, T, H, Dv). Records no gradient."""
    n = tiling_of(query, key, value, call)
    output = query.new_zeros(*query.shape[:3], value.shape[3])
    buffer = memory(n, call, n.wide)
    narrow = buffer if n.dtype == n.wide else memory(n, call, n.dtype)
    for chunk in chunks(n):
        keys, values = key_rows(n, key, chunk, n.wide), key_rows(n, value, chunk, n.dtype)
        for block in blocks(n, call, chunk):
            columns = slice(block.start, block.stop)
            tile = tile_of(n, call, buffer, chunk, block)
            rows = query_rows(n, query, chunk, block, n.wide)
            weights(n, call, chunk, block, tile, rows, keys[:, columns])
            if call.seed is not None:
                tile.scores.mul_(keep_factor(n, call, chunk, block))
            if narrow is not buffer:
                tile = tile_of(n, call, narrow, chunk, block).copy_(tile)
            put_query_rows(n, output, chunk, block, torch.bmm(tile.scores, values[:, columns]))
    return output


def flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, bias_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of query, key, value, bias and sinks for the gradient (B, T, H, Dv) of the output.

    That of sinks is None where there are none, that of bias also where `bias_grad` is False.
    """
    n = tiling_of(query, key, value, call)
    grad_query, grad_key, grad_value = (x.new_zeros(x.shape) for x in (query, key, value))
    wide = n.wide  # many tiles are added up for a key
    grad_bias = None if call.bias is None or not bias_grad else torch.zeros_like(call.bias, dtype=wide)
    grad_sinks = None if call.sinks is None else torch.zeros(n.kv_heads, n.group, dtype=wide)
    buffer, grad_buffer = (memory(n, call, dtype) for dtype in (wide, n.dtype))
    narrow = buffer if n.dtype == wide else memory(n, call, n.dtype)
    without_sinks = call._replace(sinks=None)
    spare = None if call.softcap is None else memory(n, without_sinks, wide)
    for chunk in chunks(n):
        keys, values = key_rows(n, key, chunk, n.dtype), key_rows(n, value, chunk, n.dtype)
        wide_keys = keys if n.dtype == wide else key_rows(n, key, chunk, wide)
        grad_keys, grad_values = torch.zeros_like(keys, dtype=wide), torch.zeros_like(values, dtype=wide)
        for block in blocks(n, call, chunk):
            columns = slice(block.start, block.stop)
            tile, grad_tile = (tile_of(n, call, x, chunk, block) for x in (buffer, grad_buffer))
            capped = None
            if spare is not None:
                capped = tile_of(n, without_sinks, spare, chunk, block).scores
            rows, grad_rows = (query_rows(n, x, chunk, block, n.dtype) for x in (query, grad))
            weights(n, call, chunk, block, tile, rows.to(wide), wide_keys[:, columns], capped)
            if narrow is not buffer:
                tile = tile_of(n, call, narrow, chunk, block).copy_(tile)
            if call.sinks is not None:
                grad_tile.whole.zero_()  # the sink's own weight has no value
            torch.baddbmm(grad_tile.scores, grad_rows, values[:, columns].mT, beta=0, out=grad_tile.scores)
            kept = tile.scores
            if call.seed is not None:
                factor = keep_factor(n, call, chunk, block)
                kept = kept * factor
                grad_tile.scores.mul_(factor)
            _add_product(grad_values[:, columns], kept.mT, grad_rows, 1.0)
            torch._softmax_backward_data(grad_tile.whole, tile.whole, -1, n.dtype, grad_input=grad_tile.whole)
            split = grad_tile.split(n, chunk)
            if grad_bias is not None:
                target = part(n, grad_bias, chunk, block)
                target += split.sum_to_size(_broadcast(target.shape, split.shape))
            if grad_sinks is not None:
                sink_column = grad_tile.whole.view(*split.shape[:-1], -1)[..., split.shape[-1]]
                grad_sinks[chunk.k0 : chunk.k1] += sink_column.sum(dim=(0, 2))
            if capped is not None:
                grad_tile.scores.mul_(capped.square_().neg_().add_(1.0))
            product = torch.bmm(grad_tile.scores, keys[:, columns]).mul_(call.scale)
            put_query_rows(n, grad_query, chunk, block, product)
            _add_product(grad_keys[:, columns], grad_tile.scores.mT, rows, call.scale)
        put_key_rows(grad_key, chunk, grad_keys)
        put_key_rows(grad_value, chunk, grad_values)
    return grad_query, grad_key, grad_value, grad_bias, None if grad_sinks is None else grad_sinks.reshape(-1)


def _add_product(total: Tensor, a: Tensor, b: Tensor, factor: float) -> None:
    """total += factor * a @ b, (N, I, J) and (N, J, L), where `total` may be wider than the products."""
    if total.dtype == a.dtype:
        total.baddbmm_(a, b, alpha=factor)
    else:
        total.add_(torch.bmm(a, b), alpha=factor)


def _broadcast(shape: torch.Size, full: torch.Size) -> list[int]:
    return [1 if a == 1 else b for a, b in zip(shape, full, strict=True)]
