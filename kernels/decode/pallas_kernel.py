"""Decoding attention on TPU in Pallas: one pass over the cache in its own layout, all heads of a key block at a time.

The query heads that read one key/value head are the rows of one matrix. Lengths are prefetched into scalar memory:
blocks beyond a sequence's keys, or left of its window, are neither fetched nor computed.
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
from easytorch.kernels.decode.jax_native import added_of, capped, precision_of

# Bytes of the two blocks of keys and values in flight. A kernel has 16 MiB of vector memory by default, and what is
# computed from a block takes as much again: 8 MiB asked for 16.5.
BLOCK_BYTES = 4 << 20
BLOCKS = (512, 256, 128)  # keys, the largest that fits


class Settings(NamedTuple):
    call: AttentionCall  # its numbers
    keys: int  # of the cache
    block: int


def block_of(key: Array, value: Array) -> int | None:
    """Keys of a block, or None where even the smallest block does not fit vector memory."""
    kv_heads, bytes_each = key.shape[2], key.dtype.itemsize
    sublanes = 32 // bytes_each
    wide = sum(-(-x.shape[3] // 128) * 128 for x in (key, value))
    a_key = -(-kv_heads // sublanes) * sublanes * wide * bytes_each
    return next((block for block in BLOCKS if 2 * block * a_key <= BLOCK_BYTES), None)


def decode(
    query: Array,
    key: Array,
    value: Array,
    lengths: Array | None,
    call: AttentionCall,
    *,
    interpret: bool = False,
) -> Array:
    """As `jax_native.decode`, for arrays that are not empty and have a block. interpret: by Pallas's interpreter."""
    sinks = call.sinks
    batch, _, heads, dim = query.shape
    keys, kv_heads, value_dim = key.shape[1], key.shape[2], value.shape[3]
    group, block = heads // kv_heads, block_of(key, value)
    assert block is not None, "a cache whose blocks do not fit is jax_native's"
    block = min(block, keys)
    n = Settings(numbers_of(call), keys, block)
    ends = jnp.full(batch, keys, jnp.int32) if lengths is None else jnp.clip(lengths, 0, keys).astype(jnp.int32)

    def in_reach(b: Any, j: Any, ends: Any) -> Any:
        """The block itself if it is read, else the nearest one that is, so that nothing new is fetched."""
        first, last = _blocks(n, ends[b])
        return jnp.clip(j, first, jnp.maximum(last - 1, first))

    added = added_of(call)
    arrays = [query.reshape(batch, kv_heads, group, dim), key, value]
    specs = [
        pl.BlockSpec((1, kv_heads, group, dim), lambda b, j, ends: (b, 0, 0, 0)),
        *(
            pl.BlockSpec((1, block, kv_heads, x.shape[3]), lambda b, j, ends: (b, in_reach(b, j, ends), 0, 0))
            for x in (key, value)
        ),
    ]
    if added is not None:
        # (B or 1, K, G or 1, S): a block of it is added to the scores of a head
        added = jnp.broadcast_to(added, (*added.shape[:2], keys))
        added = added.reshape(added.shape[0], kv_heads if added.shape[1] == heads else 1, -1, keys)
        whole = added.shape[0] == 1
        arrays.append(added)
        specs.append(
            pl.BlockSpec(
                (1, *added.shape[1:3], block), lambda b, j, ends: (0 if whole else b, 0, 0, in_reach(b, j, ends))
            )
        )
    if sinks is not None:
        arrays.append(sinks.astype(jnp.float32).reshape(kv_heads, group, 1))
        specs.append(pl.BlockSpec((kv_heads, group, 1), lambda b, j, ends: (0, 0, 0)))
    output = pl.pallas_call(
        functools.partial(_kernel, n, added is not None, sinks is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, pl.cdiv(keys, block)),
            in_specs=specs,
            out_specs=pl.BlockSpec((1, kv_heads, group, value_dim), lambda b, j, ends: (b, 0, 0, 0)),
            scratch_shapes=[pltpu.VMEM((kv_heads, group, width), jnp.float32) for width in (1, 1, value_dim)],
        ),
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, group, value_dim), query.dtype),
        interpret=interpret,
        compiler_params=_COMPILER_PARAMS(dimension_semantics=("parallel", "arbitrary")),
    )(ends, *arrays)
    return output.reshape(batch, 1, heads, value_dim)


def _blocks(n: Settings, end: Any) -> tuple[Any, Any]:
    """The blocks [first, last) that hold keys which the query at key end - 1 sees."""
    first = jnp.int32(0) if n.call.left is None else lax.div(jnp.maximum(end - 1 - n.call.left, 0), jnp.int32(n.block))
    return first, lax.div(end + (n.block - 1), jnp.int32(n.block))


def _kernel(
    n: Settings, has_added: bool, has_sinks: bool, ends: Any, query: Any, key: Any, value: Any, *refs: Any
) -> None:
    extras, (output, m_refs, l_ref, sums) = list(refs[:-4]), refs[-4:]
    added = extras.pop(0) if has_added else None
    sinks = extras.pop(0) if has_sinks else None
    end, j = ends[pl.program_id(0)], pl.program_id(1)
    first, last = _blocks(n, end)

    @pl.when(j == 0)
    def _() -> None:
        m_refs[...] = jnp.full_like(m_refs, -jnp.inf) if sinks is None else sinks[...]
        l_ref[...] = jnp.where(m_refs[...] == -jnp.inf, 0.0, 1.0)  # a sink is a logit already seen
        sums[...] = jnp.zeros_like(sums)

    @pl.when((j >= first) & (j < last))
    def _() -> None:
        kv_heads, group = query.shape[1:3]
        start = j * n.block
        column = start + lax.broadcasted_iota(jnp.int32, (group, n.block), 1)
        seen = column < end if n.call.left is None else (column < end) & (column >= end - 1 - n.call.left)
        written = start + lax.broadcasted_iota(jnp.int32, (n.block, 1), 0) < end
        precision = precision_of(query)
        for head in range(kv_heads):
            products = _dot(query[0, head], key[0, :, head, :], 1, precision)
            scores = capped(products, n.call)
            if added is not None:
                scores = scores + added[0, head if added.shape[1] > 1 else 0]
            scores = jnp.where(seen, scores, -jnp.inf)
            m_i = jnp.maximum(m_refs[head], scores.max(axis=-1, keepdims=True))
            finite = jnp.where(m_i == -jnp.inf, 0.0, m_i)
            weights, alpha = jnp.exp(scores - finite), jnp.exp(m_refs[head] - finite)
            # what lies beyond may be NaN, and zero times NaN is not zero
            values = jnp.where(written, value[0, :, head, :], jnp.zeros((), value.dtype))
            l_ref[head] = l_ref[head] * alpha + weights.sum(axis=-1, keepdims=True)
            sums[head] = sums[head] * alpha + _dot(weights.astype(values.dtype), values, 0, precision)
            m_refs[head] = m_i

    @pl.when(j == pl.num_programs(1) - 1)
    def _() -> None:
        l_i = l_ref[...]
        output[0] = (sums[...] / jnp.where(l_i == 0.0, 1.0, l_i)).astype(output.dtype)


def _dot(a: Array, b: Array, contract: int, precision: lax.Precision) -> Array:
    dims = (((1,), (contract,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


_COMPILER_PARAMS: Any = pltpu.CompilerParams
