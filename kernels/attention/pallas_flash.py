"""Attention by online softmax on TPU in Pallas, forward and backward; the arguments and results of jax_flash.py.

Follows FlashAttention-2, https://arxiv.org/abs/2307.08691. Tiles outside the causal band or window are neither
computed nor fetched. Memory is linear in T, except for the gradient of a bias, which is materialized.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from easytorch.kernels.attention.jax_call import AttentionCall
from easytorch.kernels.attention.jax_flash import sink_weights, summed_to
from easytorch.kernels.attention.pallas_flash_backward import Saved, backward_keys, backward_queries
from easytorch.kernels.attention.pallas_flash_forward import forward
from easytorch.kernels.attention.pallas_flash_inputs import (
    grid_of,
    heads_first,
    heads_first_transposed,
    logsumexp_rows,
    padded_to_tiles,
    rows_of,
)
from easytorch.kernels.attention.pallas_tuning import backward_blocks, forward_blocks


def flash_forward(
    query: Array,
    key: Array,
    value: Array,
    call: AttentionCall,
    *,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """As `jax_flash.flash_forward`, for arrays that are not empty. interpret: run by Pallas's interpreter."""
    n = grid_of(query, key, forward_blocks(max(query.shape[-1], value.shape[-1]), _bits(query)))
    call = padded_to_tiles(n, call)
    output, logsumexp = forward(
        n, call, heads_first(query, n.rows), heads_first(key, n.columns), heads_first_transposed(value, n.columns),
        interpret=interpret,
    )  # fmt: skip
    return output[..., : n.length].transpose(0, 3, 1, 2), logsumexp[..., : n.length]


def flash_backward(
    query: Array,
    key: Array,
    value: Array,
    call: AttentionCall,
    output: Array,
    logsumexp: Array,
    grad: Array,
    *,
    bias_grad: bool = True,
    interpret: bool = False,
) -> tuple[Array, Array, Array, Array | None, Array | None]:
    """As `jax_flash.flash_backward`, for arrays that are not empty. interpret: run by Pallas's interpreter."""
    n = grid_of(query, key, backward_blocks(max(query.shape[-1], value.shape[-1]), _bits(query)))
    bias, sinks = call.bias, call.sinks
    call = padded_to_tiles(n, call)
    delta = jnp.einsum("bthd,bthd->bht", output.astype(jnp.float32), grad.astype(jnp.float32))
    saved = Saved(
        query=heads_first(query, n.rows),
        key=heads_first(key, n.columns),
        value=heads_first(value, n.columns),
        grad=heads_first(grad.astype(query.dtype), n.rows),
        logsumexp=logsumexp_rows(n, logsumexp),
        delta=rows_of(n, delta, 0.0),
    )
    grad_key, grad_value = backward_keys(n, call, saved, interpret=interpret)
    wants_bias = bias is not None and bias_grad
    of_rows = bias is not None and bias.shape[-1] == 1  # logsumexp.sink_share
    by_scores = wants_bias and not of_rows
    grad_query, *grad_scores = backward_queries(
        n, call, saved, heads_first_transposed(key, n.columns), bias_grad=by_scores, interpret=interpret
    )
    grad_sinks, share = None, jnp.zeros_like(delta)
    if sinks is not None:
        share = sink_weights(sinks, logsumexp) * delta
        grad_sinks = -share.sum(axis=(0, 2)).astype(sinks.dtype)
    grad_bias = None
    if bias is not None and wants_bias:
        of_scores = share[..., None] if of_rows else grad_scores[0][:, :, : n.keys, : n.length].swapaxes(2, 3)
        grad_bias = summed_to(bias, of_scores)
    return (
        grad_query[..., : n.length].transpose(0, 3, 1, 2).astype(query.dtype),
        grad_key[:, :, : n.keys].swapaxes(1, 2).astype(key.dtype),
        grad_value[:, :, : n.keys].swapaxes(1, 2).astype(value.dtype),
        grad_bias,
        grad_sinks,
    )


def _bits(array: Array) -> int:
    return array.dtype.itemsize * 8
