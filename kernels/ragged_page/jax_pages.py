"""Attention over pages in plain jax: one block of a sequence's rows at a time, over the pages that it attends to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from easytorch.kernels.attention.jax_call import AttentionCall
from easytorch.kernels.ragged_page.jax_blocks import (
    blocks_of,
    capped,
    merge,
    page_range,
    precision_of,
    seen,
)

ROWS, KEYS = 16, 128  # tokens per block, keys per tile


def ragged_page_attention(
    query: Array,
    tail_query: Array | None,
    key_pages: Array,
    tail_pages: Array | None,
    value_pages: Array | None,
    context_lens: Array,
    block_tables: Array,
    query_start_loc: Array,
    num_seqs: Array | None,
    call: AttentionCall,
    *,
    value_dim: int,
) -> Array:
    """(N, H, D), (P, page_size, K, D), (P, page_size, K, Dv) -> (N, H, Dv); pages of three dimensions have K = 1.

    Without value_pages the values are the first `value_dim` columns of the keys. tail_query (N, H, E) and tail_pages
    (P, page_size, K, E), where given, are more of each query and key.
    """
    sinks = call.sinks
    tokens, heads, _ = query.shape
    if query.size == 0 or context_lens.size == 0 or block_tables.size == 0:
        return jnp.zeros((tokens, heads, value_dim), query.dtype)
    page_size, kv_heads = key_pages.shape[1], 1 if key_pages.ndim == 3 else key_pages.shape[2]
    group, step = heads // kv_heads, max(1, KEYS // page_size)
    capacity = block_tables.shape[1] * page_size
    blocks, taken = blocks_of(tokens, ROWS, capacity, context_lens, query_start_loc, num_seqs)
    first, last = page_range(call, blocks, ROWS, page_size)
    precision = precision_of(query)
    m_i = jnp.full((kv_heads, group, 1, 1), -jnp.inf)
    if sinks is not None:
        m_i = sinks.astype(jnp.float32).reshape(m_i.shape)
    m_i = jnp.broadcast_to(m_i, (kv_heads, group, ROWS, 1))
    start = (m_i, jnp.where(m_i == -jnp.inf, 0.0, 1.0), jnp.zeros((kv_heads, group, ROWS, value_dim)))

    def block(i: Array) -> Array:
        own = (blocks.keys - blocks.length + blocks.row)[i] + jnp.arange(ROWS)[:, None]
        queries = query[taken[i]].astype(jnp.float32).reshape(ROWS, kv_heads, group, -1)

        def tile(j: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            m_i, l_i, output = state
            place = first[i] + j * step + jnp.arange(step)
            pages = block_tables[blocks.sequence[i], jnp.minimum(place, last[i] - 1)]
            column = (place[:, None] * page_size + jnp.arange(page_size)).reshape(-1)

            def gather(pool: Array) -> Array:
                return pool[pages].astype(jnp.float32).reshape(step * page_size, kv_heads, -1)

            keys = gather(key_pages)
            products = jnp.einsum("rkgd,ckd->kgrc", queries, keys, precision=precision)
            if tail_query is not None and tail_pages is not None:
                tails = tail_query[taken[i]].astype(jnp.float32).reshape(ROWS, kv_heads, group, -1)
                products += jnp.einsum("rkgd,ckd->kgrc", tails, gather(tail_pages), precision=precision)
            visible = seen(call, own, column, blocks.keys[i])
            m_i, alpha, weights = merge(m_i, jnp.where(visible, capped(call, products), -jnp.inf))
            l_i = l_i * alpha + weights.sum(axis=-1, keepdims=True)
            values = keys[..., :value_dim] if value_pages is None else gather(value_pages)
            # a slot that was never written may hold NaN
            values = jnp.where((column < blocks.keys[i])[:, None, None], values, 0.0)
            output = output * alpha + jnp.einsum("kgrc,ckd->kgrd", weights, values, precision=precision)
            return m_i, l_i, output

        steps = (last[i] - first[i] + step - 1) // step
        _, l_i, output = lax.fori_loop(0, steps, tile, start)
        output = output / jnp.where(l_i == 0.0, 1.0, l_i)
        return output.transpose(2, 0, 1, 3).reshape(ROWS, heads, value_dim)

    output = lax.map(block, jnp.arange(taken.shape[0])).reshape(-1, heads, value_dim)
    return jax.numpy.take(output, blocks.token, axis=0, mode="fill", fill_value=0).astype(query.dtype)
