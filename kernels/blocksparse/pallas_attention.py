"""Block-sparse attention on TPU in Pallas, forward and backward, for arrays (T, S and B not zero).

The block map is scalar data, fetched before the grid starts: see pallas_map.py. Memory is linear in T, except for the
gradient of a bias, which is materialized.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from easytorch.kernels.attention.jax_call import AttentionCall
from easytorch.kernels.attention.jax_flash import sink_weights
from easytorch.kernels.attention.jax_flash_tiles import pad
from easytorch.kernels.attention.pallas_flash_backward import Saved
from easytorch.kernels.attention.pallas_flash_inputs import (
    grid_of,
    heads_first,
    heads_first_transposed,
    logsumexp_rows,
    padded_to_tiles,
    rows_of,
)
from easytorch.kernels.attention.pallas_flash_tiles import Grid
from easytorch.kernels.attention.pallas_tuning import backward_blocks, forward_blocks
from easytorch.kernels.blocksparse.pallas_backward import backward_keys, backward_queries
from easytorch.kernels.blocksparse.pallas_forward import forward
from easytorch.kernels.blocksparse.pallas_map import walks
from easytorch.kernels.blocksparse.structure import Rule


def blocksparse_forward(
    query: Array,
    key: Array,
    value: Array,
    call: AttentionCall,
    prefix: Array | None = None,
    *,
    rule: Rule,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """(B, T, H, D), (B, S, K, D), (B, S, K, Dv) -> output (B, T, H, Dv), logsumexp (B, H, 2, T) float32.

    prefix: int32 (B or 1,), with rule.prefix True. interpret: run by Pallas's interpreter.
    """
    n = grid_of(query, key, forward_blocks(max(query.shape[-1], value.shape[-1]), _bits(query)))
    begin, end = intervals_of(n, rule, prefix)
    walk = walks(n, rule, begin, end, *_by_tiles(call), by_columns=False)
    call = padded_to_tiles(n, call)
    output, logsumexp = forward(
        n, call, walk, heads_first(query, n.rows),
        heads_first(key, n.columns), heads_first_transposed(value, n.columns), *_padded(n, begin, end),
        interpret=interpret,
    )  # fmt: skip
    return output[..., : n.length].transpose(0, 3, 1, 2), logsumexp[..., : n.length]


def blocksparse_backward(
    query: Array,
    key: Array,
    value: Array,
    call: AttentionCall,
    prefix: Array | None,
    output: Array,
    logsumexp: Array,
    grad: Array,
    *,
    rule: Rule,
    bias_grad: bool = True,
    interpret: bool = False,
) -> tuple[Array, Array, Array, Array | None, Array | None]:
    """Gradients of query, key, value, bias and sinks."""
    n = grid_of(query, key, backward_blocks(max(query.shape[-1], value.shape[-1]), _bits(query)))
    bias, sinks = call.bias, call.sinks
    begin, end = intervals_of(n, rule, prefix)
    structure = (n, rule, begin, end, *_by_tiles(call))
    padded, call = _padded(n, begin, end), padded_to_tiles(n, call)
    delta = jnp.einsum("bthd,bthd->bht", output.astype(jnp.float32), grad.astype(jnp.float32))
    saved = Saved(
        query=heads_first(query, n.rows),
        key=heads_first(key, n.columns),
        value=heads_first(value, n.columns),
        grad=heads_first(grad.astype(query.dtype), n.rows),
        logsumexp=logsumexp_rows(n, logsumexp),
        delta=rows_of(n, delta, 0.0),
    )
    grad_key, grad_value = backward_keys(
        n, call, walks(*structure, by_columns=True), saved, *padded, interpret=interpret
    )
    wants_bias = bias is not None and bias_grad
    grad_query, *grad_scores = backward_queries(
        n, call, walks(*structure, by_columns=False, everything=wants_bias), saved,
        heads_first_transposed(key, n.columns), *padded, bias_grad=wants_bias, interpret=interpret,
    )  # fmt: skip
    grad_sinks = None
    if sinks is not None:
        grad_sinks = -(sink_weights(sinks, logsumexp) * delta).sum(axis=(0, 2)).astype(sinks.dtype)
    return (
        grad_query[..., : n.length].transpose(0, 3, 1, 2).astype(query.dtype),
        grad_key[:, :, : n.keys].swapaxes(1, 2).astype(key.dtype),
        grad_value[:, :, : n.keys].swapaxes(1, 2).astype(value.dtype),
        None if bias is None or not wants_bias else _summed_to(bias, grad_scores[0][:, :, : n.keys, : n.length]),
        grad_sinks,
    )


def intervals_of(n: Any, rule: Rule, prefix: Array | None) -> tuple[Array, Array]:
    """begin and end, int32 (B or 1, T). n: anything that has `length` and `keys`."""
    own = jnp.arange(n.length, dtype=jnp.int32)[None] + (n.keys - n.length)
    given = prefix.reshape(-1, 1).astype(jnp.int32) if prefix is not None else rule.prefix
    begin, end = rule.of(own, n.keys, given)
    return begin.astype(jnp.int32), end.astype(jnp.int32)


def _padded(n: Grid, begin: Array, end: Array) -> tuple[Array, Array]:
    """(B or 1, 1, T padded), where a padded query sees nothing."""
    return pad(begin[:, None], 2, n.rows), pad(end[:, None], 2, n.rows)


def _by_tiles(call: AttentionCall) -> tuple[Array | None, Array | None, Array | None]:
    """The tensors that decide which tiles are needed: the mask in four dimensions, and the segment ids."""
    mask = None if call.mask is None else call.mask.reshape((1,) * (4 - call.mask.ndim) + call.mask.shape)
    return mask, call.query_segment_ids, call.key_segment_ids


def _summed_to(bias: Array, grad_scores: Array) -> Array:
    """The gradient (B, H, S, T) of the scores, transposed and summed to the shape of the bias."""
    full = (1,) * (4 - bias.ndim) + bias.shape
    axes = tuple(axis for axis, size in enumerate(full) if size == 1)
    return grad_scores.swapaxes(2, 3).sum(axis=axes, keepdims=True).reshape(bias.shape).astype(bias.dtype)


def _bits(array: Array) -> int:
    return array.dtype.itemsize * 8
