"""Attention over pages on TPU in Pallas: pages are fetched through the block table, with double buffering.

One program per block of one sequence's tokens, all heads. The queries of the G heads that read one key/value head are
the rows of one matrix, G first. The description of a program's block is prefetched into scalar memory.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from easytorch.kernels.attention.jax_call import AttentionCall
from easytorch.kernels.attention.pallas_flash_tiles import numbers_of
from easytorch.kernels.ragged_page.jax_blocks import (
    blocks_of,
    capped,
    merge,
    page_range,
    precision_of,
    seen,
)

ROWS = 256  # of a matrix of queries, when there is more than one token a sequence
KEYS = 128  # of a tile
TABLE_BYTES = 1 << 19  # of block tables, in scalar memory (1 MiB, of v4 on)


class PageTiling(NamedTuple):
    """The dimensions of a call, the tokens of a program's block and the pages of a tile of keys."""

    kv_heads: int
    group: int
    tokens: int  # of a block
    page_size: int
    pages: int  # of a tile
    columns: int  # of block_tables
    value_dim: int


def supports(
    query: Array,
    tail_query: Array | None,
    key_pages: Array,
    tail_pages: Array | None,
    value_pages: Array | None,
    context_lens: Array,
    block_tables: Array,
) -> str | None:
    """None when the kernel takes arrays of these shapes, else the reason why not."""
    if block_tables.size * 4 > TABLE_BYTES:
        return f"block tables of {block_tables.size * 4} bytes do not fit scalar memory"
    for pages in (key_pages, tail_pages, value_pages):
        if pages is not None and pages.ndim == 4 and pages.shape[3] % 128:
            return f"head_dim {pages.shape[3]} is not a multiple of the 128 lanes of a register"
    return None


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
    interpret: bool = False,
) -> Array:
    """As `jax_pages.ragged_page_attention`, for arrays that are not empty. interpret: run by Pallas's interpreter."""
    sinks = call.sinks
    count, heads, _ = query.shape
    page_size, kv_heads = key_pages.shape[1], 1 if key_pages.ndim == 3 else key_pages.shape[2]
    group = heads // kv_heads
    # a power of two: a row's token is its index modulo this
    tokens = 1 if count <= context_lens.shape[0] else max(1, 1 << (ROWS // group).bit_length() - 1)
    n = PageTiling(kv_heads, group, tokens, page_size, max(1, KEYS // page_size), block_tables.shape[1], value_dim)
    capacity = n.columns * page_size
    blocks, taken = blocks_of(count, tokens, capacity, context_lens, query_start_loc, num_seqs)
    first, last = page_range(call, blocks, tokens, page_size)
    scalars = (
        blocks.sequence * n.columns, blocks.keys - blocks.length + blocks.row, blocks.keys, first, last,
        jnp.clip(block_tables.astype(jnp.int32), 0, key_pages.shape[0] - 1).reshape(-1),
    )  # fmt: skip

    def rows_of(x: Array) -> Array:
        """(N, H, D) -> (blocks, K, G * tokens, D)."""
        x = x[taken].reshape(-1, tokens, kv_heads, group, x.shape[-1]).transpose(0, 2, 3, 1, 4)
        return x.reshape(x.shape[0], kv_heads, group * tokens, x.shape[-1])

    rows = group * tokens
    inputs: dict[str, Array] = {"query": rows_of(query)}
    if tail_query is not None:
        inputs["tail_query"] = rows_of(tail_query)
    if sinks is not None:
        inputs["sinks"] = jnp.repeat(sinks.astype(jnp.float32).reshape(kv_heads, group, 1), tokens, 1)
    named = {"key": key_pages, "tail": tail_pages, "value": value_pages}
    pools = {name: pool for name, pool in named.items() if pool is not None}

    def block_spec(x: Any) -> pl.BlockSpec:
        if x.ndim == 3:
            return pl.BlockSpec(x.shape, lambda i, *_: (0, 0, 0))
        return pl.BlockSpec((1, *x.shape[1:]), lambda i, *_: (i, 0, 0, 0))

    output = jax.ShapeDtypeStruct((taken.shape[0], kv_heads, rows, value_dim), query.dtype)
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(scalars),
        grid=(taken.shape[0],),
        in_specs=[block_spec(x) for x in inputs.values()] + [pl.BlockSpec(memory_space=_ANY) for _ in pools],
        out_specs=block_spec(output),
        scratch_shapes=[
            pltpu.VMEM((kv_heads, rows, 1), jnp.float32),
            pltpu.VMEM((kv_heads, rows, 1), jnp.float32),
            pltpu.VMEM((kv_heads, rows, value_dim), jnp.float32),
            *(pltpu.VMEM((2, n.pages, *pool.shape[1:]), pool.dtype) for pool in pools.values()),
            pltpu.SemaphoreType.DMA((2, len(pools))),
        ],
    )
    result = pl.pallas_call(
        functools.partial(_kernel, n, numbers_of(call), tuple(inputs), tuple(pools)),
        grid_spec=grid_spec, out_shape=output, interpret=interpret,
        compiler_params=CompilerParams(dimension_semantics=("arbitrary",)),
    )(*scalars, *inputs.values(), *pools.values())  # fmt: skip
    result = result.reshape(-1, kv_heads, group, tokens, value_dim).transpose(0, 3, 1, 2, 4)
    result = result.reshape(-1, heads, value_dim)
    return jnp.take(result, blocks.token, axis=0, mode="fill", fill_value=0)


def _kernel(
    n: PageTiling, call: AttentionCall, inputs: tuple[str, ...], pools: tuple[str, ...],
    table_start: Any, own_key: Any, key_count: Any, first_page: Any, last_page: Any, table: Any, *refs: Any,
) -> None:  # fmt: skip
    given = dict(zip(inputs, refs, strict=False))
    pages = dict(zip(pools, refs[len(inputs) :], strict=False))
    output_ref, m_ref, l_ref, sum_ref, *rest = refs[len(inputs) + len(pools) :]
    buffers, semaphores = dict(zip(pools, rest, strict=False)), rest[-1]
    i = pl.program_id(0)
    first, last, keys = first_page[i], last_page[i], key_count[i]
    steps = lax.div(last - first + (n.pages - 1), jnp.int32(n.pages))  # `//` would need the TPU's version
    tile, rows = n.pages * n.page_size, n.group * n.tokens

    def transfer(j: Any, slot: Any, act: str) -> None:
        """Starts or awaits the copies of tile j's pages; past its end a sequence's last page is repeated."""

        def page_of(p: Any, carry: Any) -> Any:
            page = table[table_start[i] + jnp.minimum(first + j * n.pages + p, last - 1)]
            for which, name in enumerate(pools):
                place = buffers[name].at[slot, p]
                getattr(pltpu.make_async_copy(pages[name].at[page], place, semaphores.at[slot, which]), act)()
            return carry

        lax.fori_loop(jnp.int32(0), jnp.int32(n.pages), page_of, jnp.int32(0))

    m_ref[...] = given["sinks"][...] if "sinks" in given else jnp.full_like(m_ref, -jnp.inf)
    l_ref[...] = jnp.where(m_ref[...] == -jnp.inf, 0.0, 1.0)  # a sink counts as a logit already seen
    sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.when(steps > 0)
    def _() -> None:
        transfer(jnp.int32(0), jnp.int32(0), "start")

    def step(j: Any, carry: Any) -> Any:
        slot = lax.rem(j, jnp.int32(2))

        @pl.when(j + 1 < steps)
        def _() -> None:
            transfer(j + 1, 1 - slot, "start")

        transfer(j, slot, "wait")
        start = (first + j * n.pages) * n.page_size
        column = start + lax.broadcasted_iota(jnp.int32, (rows, tile), 1)
        token = lax.broadcasted_iota(jnp.int32, (rows, tile), 0) & (n.tokens - 1)
        visible = seen(call, own_key[i] + token, column, keys)
        written = start + lax.broadcasted_iota(jnp.int32, (tile, 1), 0) < keys
        for head in range(n.kv_heads):
            key = _head(buffers["key"], slot, head)
            query = given["query"][0, head]
            precision = precision_of(query)
            products = _dot(query, key, 1, precision)
            if "tail" in buffers:
                products += _dot(given["tail_query"][0, head], _head(buffers["tail"], slot, head), 1, precision)
            logits = jnp.where(visible, capped(call, products), -jnp.inf)
            m_i, alpha, weights = merge(m_ref[head], logits)
            m_ref[head] = m_i
            l_ref[head] = l_ref[head] * alpha + weights.sum(axis=-1, keepdims=True)
            value = _head(buffers["value"], slot, head) if "value" in buffers else key[:, : n.value_dim]
            # a slot that was never written may hold NaN
            value = jnp.where(written, value, jnp.zeros_like(value))
            sum_ref[head] = sum_ref[head] * alpha + _dot(weights.astype(value.dtype), value, 0, precision)
        return carry

    lax.fori_loop(jnp.int32(0), steps, step, jnp.int32(0))
    l_i = l_ref[...]
    output_ref[0] = (sum_ref[...] / jnp.where(l_i == 0.0, 1.0, l_i)).astype(output_ref.dtype)


def _head(buffer: Any, slot: Any, head: int) -> Array:
    """(tile, D) of one key/value head."""
    part = buffer[slot] if len(buffer.shape) == 4 else buffer[slot, :, :, head, :]
    return part.reshape(-1, part.shape[-1])


def _dot(a: Array, b: Array, contract: int, precision: lax.Precision) -> Array:
    dims = (((1,), (contract,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


# jax 0.7 and later names
_ANY: Any = pl.ANY
CompilerParams: Any = pltpu.CompilerParams
