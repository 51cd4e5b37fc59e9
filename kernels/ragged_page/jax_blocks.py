"""Blocks of a ragged batch's rows, each of one sequence, in jax; and attention over such blocks.

Array shapes are static while lengths are data: the blocks of sequence b start at start[b] // rows + b, so that N //
rows + B + 1 blocks always suffice. See contract.py.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from easytorch.kernels.attention.jax_call import AttentionCall


class SequenceBlocks(NamedTuple):
    """int32 of each block: its sequence, its first row among the sequence's `length` queries and `keys` keys.

    token (N,) int32: each token's row, block * rows + position; out of range for a token of no sequence.
    """

    sequence: Array
    row: Array
    length: Array
    keys: Array
    token: Array


def blocks_of(
    tokens: int, rows: int, capacity: int, context_lens: Array, query_start_loc: Array, num_seqs: Array | None
) -> tuple[SequenceBlocks, Array]:
    """The blocks of `rows` tokens, and the token (blocks, rows) at each position (an arbitrary one at padding).

    capacity: keys that a row of block_tables holds. What no check has looked at stays inside the tensors.
    """
    batch = context_lens.shape[0]
    count = jnp.int32(batch) if num_seqs is None else jnp.clip(num_seqs.reshape(()).astype(jnp.int32), 0, batch)
    index = jnp.arange(batch + 1, dtype=jnp.int32)
    blocks = tokens // rows + batch + 1
    # entries of sequences past num_seqs are not read
    starts = jnp.where(index <= count, query_start_loc.astype(jnp.int32), tokens)
    first = jnp.where(index <= count, starts // rows + index, blocks)
    block = jnp.arange(blocks, dtype=jnp.int32)
    sequence = jnp.searchsorted(first, block, side="right").astype(jnp.int32) - 1
    owned = (sequence >= 0) & (sequence < count)
    held = jnp.clip(sequence, 0, batch - 1)  # an existing sequence
    length = jnp.where(owned, starts[held + 1] - starts[held], 0)
    keys = jnp.where(owned, jnp.clip(context_lens.astype(jnp.int32)[held], 0, capacity), 0)
    row = (block - first[sequence]) * rows
    keys = jnp.where(row < length, keys, 0)  # a block without rows computes nothing

    token = jnp.arange(tokens, dtype=jnp.int32)
    of = jnp.searchsorted(starts, token, side="right").astype(jnp.int32) - 1
    of = jnp.where(token < starts[count], jnp.minimum(of, count - 1), count)
    local = token - starts[of]
    place = (first[of] + local // rows) * rows + local % rows
    place = jnp.where(of < count, place, blocks * rows)
    taken = jnp.clip(starts[sequence][:, None] + row[:, None] + jnp.arange(rows, dtype=jnp.int32), 0, tokens - 1)
    return SequenceBlocks(held, row, length, keys, place), taken


def page_range(call: AttentionCall, blocks: SequenceBlocks, rows: int, page_size: int) -> tuple[Array, Array]:
    """The columns [first, last) of block_tables that a block's rows can see."""
    own = blocks.keys - blocks.length + blocks.row  # the key aligned with the first row
    first, last = jnp.zeros_like(own), blocks.keys
    if call.left is not None:
        first = jnp.clip(own - call.left, 0, blocks.keys)
    if call.right is not None:
        end = own + jnp.minimum(rows, blocks.length - blocks.row) + call.right
        last = jnp.clip(end, 0, blocks.keys)
    last = (last + page_size - 1) // page_size
    return jnp.minimum(first // page_size, last), last


def seen(call: AttentionCall, own: Array, column: Array, keys: Array) -> Array:
    """Whether the row aligned with key `own` attends to key `column` of `keys`."""
    result = column < keys
    if call.left is not None:
        result &= column >= own - call.left
    if call.right is not None:
        result &= column <= own + call.right
    return result


def capped(call: AttentionCall, products: Array) -> Array:
    logits = products * call.scale
    return logits if call.softcap is None else call.softcap * jnp.tanh(logits / call.softcap)


def merge(m_i: Array, logits: Array) -> tuple[Array, Array, Array]:
    """The new maximum of each row, the factor for the old sums, and the weights of `logits`; -inf has weight 0."""
    m_new = jnp.maximum(m_i, logits.max(axis=-1, keepdims=True))
    finite = jnp.where(m_new == -jnp.inf, 0.0, m_new)
    return m_new, jnp.exp(m_i - finite), jnp.exp(logits - finite)


def precision_of(query: Array) -> lax.Precision:
    """Full float32 products on TPU too, which by default rounds operands to bfloat16."""
    return lax.Precision.HIGHEST if query.dtype == jnp.float32 else lax.Precision.DEFAULT
