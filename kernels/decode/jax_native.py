"""Decoding attention in plain jax, without torch: the reference for pallas_kernel.py, and its fallback.

The query heads of one key/value head are rows of a matrix.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from easytorch.kernels.attention.jax_call import AttentionCall


def decode(
    query: Array,
    key: Array,
    value: Array,
    lengths: Array | None,
    call: AttentionCall,
) -> Array:
    """query (B, 1, H, D), key (B, S, K, D), value (B, S, K, Dv) -> (B, 1, H, Dv); lengths (B,) or None.

    Computed in float32.
    """
    left, sinks = call.left, call.sinks
    batch, _, heads, dim = query.shape
    keys, kv_heads, value_dim = key.shape[1], key.shape[2], value.shape[3]
    if 0 in (batch, keys, value_dim):
        return jnp.zeros((batch, 1, heads, value_dim), query.dtype)
    precision = precision_of(query)
    rows = query.reshape(batch, kv_heads, heads // kv_heads, dim)
    scores = jnp.einsum("bkgd,bskd->bkgs", rows, key, precision=precision, preferred_element_type=jnp.float32)
    scores = capped(scores.reshape(batch, heads, keys), call)
    added = added_of(call)
    if added is not None:
        scores = scores + added
    ends = jnp.full(batch, keys) if lengths is None else jnp.clip(lengths, 0, keys)
    offset = jnp.arange(keys) - ends[:, None] + 1  # 0 at the query's own key
    seen = offset <= 0 if left is None else (offset <= 0) & (offset >= -left)
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    m_i = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        m_i = jnp.maximum(m_i, sinks.astype(jnp.float32)[:, None])
    m_i = jnp.where(m_i == -jnp.inf, 0.0, m_i)
    weights = jnp.exp(scores - m_i)
    l_i = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        l_i = l_i + jnp.exp(sinks.astype(jnp.float32)[:, None] - m_i)
    weights = weights / jnp.where(l_i == 0.0, 1.0, l_i)
    if lengths is not None:  # keys beyond may be NaN, and zero times NaN is not zero
        value = jnp.where((offset <= 0)[:, :, None, None], value, 0)
    grouped = weights.reshape(batch, kv_heads, heads // kv_heads, keys)
    output = jnp.einsum(
        "bkgs,bskd->bkgd", grouped, value.astype(jnp.float32), precision=precision, preferred_element_type=jnp.float32
    )
    return output.reshape(batch, 1, heads, value_dim).astype(query.dtype)


def added_of(call: AttentionCall) -> Array | None:
    """The addend of the scores, float32 (B or 1, H or 1, S or 1): the bias, and -inf where mask or segments hide."""
    parts = []
    if call.bias is not None:
        parts.append(_three_dims(call.bias).astype(jnp.float32))
    if call.mask is not None:
        parts.append(jnp.where(_three_dims(call.mask), 0.0, -jnp.inf))
    if call.query_segment_ids is not None and call.key_segment_ids is not None:
        parts.append(jnp.where(call.query_segment_ids == call.key_segment_ids, 0.0, -jnp.inf)[:, None])
    total = None
    for part in parts:
        total = part if total is None else total + part
    return total


def capped(products: Array, call: AttentionCall) -> Array:
    scores = products * call.scale
    return scores if call.softcap is None else call.softcap * jnp.tanh(scores / call.softcap)


def precision_of(query: Array) -> lax.Precision:
    """float32 in full: a TPU's default rounds it to bfloat16."""
    return lax.Precision.HIGHEST if query.dtype == jnp.float32 else lax.Precision.DEFAULT


def _three_dims(x: Array) -> Array:
    """Drops the third dimension of what broadcasts to (B, H, 1, S)."""
    return x.reshape((1,) * (4 - x.ndim) + x.shape)[:, :, 0]
