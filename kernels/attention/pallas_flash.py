"""Attention by online softmax on TPU in Pallas, forward and backward; the arguments and results of xla_flash.py.

Follows FlashAttention-2, https://arxiv.org/abs/2307.08691. Tiles that causal or the window leave empty are neither
computed nor fetched. Memory is linear in T, but for the gradient of a bias, which is formed in full.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from easytorch.kernels.attention.pallas_flash_backward import Saved, backward_keys, backward_queries
from easytorch.kernels.attention.pallas_flash_forward import forward
from easytorch.kernels.attention.pallas_flash_inputs import (
    extras_of,
    grid_of,
    heads_first,
    heads_first_transposed,
    rows_of,
)
from easytorch.kernels.attention.pallas_tuning import backward_blocks, forward_blocks
from easytorch.kernels.attention.xla_flash_tiles import Settings


def flash_forward(
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None = None,
    bias: Array | None = None,
    query_segment_ids: Array | None = None,
    key_segment_ids: Array | None = None,
    sinks: Array | None = None,
    seed: Array | None = None,
    *,
    scale: float,
    left: int | None = None,
    right: int | None = None,
    softcap: float | None = None,
    dropout_prob: float = 0.0,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """As `xla_flash.flash_forward`, for arrays that are not empty. interpret: run by Pallas's interpreter."""
    n = grid_of(query, key, forward_blocks(max(query.shape[-1], value.shape[-1]), _bits(query)))
    settings = Settings(scale, left, right, softcap, dropout_prob)
    extras = extras_of(n, mask, bias, query_segment_ids, key_segment_ids, sinks, seed)
    output, logsumexp = forward(
        n, settings, heads_first(query, n.rows), heads_first(key, n.columns), heads_first_transposed(value, n.columns),
        extras, interpret=interpret,
    )  # fmt: skip
    return output[..., : n.length].transpose(0, 3, 1, 2), logsumexp[:, :, 0, : n.length]


def flash_backward(
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None,
    bias: Array | None,
    query_segment_ids: Array | None,
    key_segment_ids: Array | None,
    sinks: Array | None,
    seed: Array | None,
    output: Array,
    logsumexp: Array,
    grad: Array,
    *,
    scale: float,
    left: int | None = None,
    right: int | None = None,
    softcap: float | None = None,
    dropout_prob: float = 0.0,
    bias_grad: bool = True,
    interpret: bool = False,
) -> tuple[Array | None, ...]:
    """As `xla_flash.flash_backward`, for arrays that are not empty. interpret: run by Pallas's interpreter."""
    n = grid_of(query, key, backward_blocks(max(query.shape[-1], value.shape[-1]), _bits(query)))
    settings = Settings(scale, left, right, softcap, dropout_prob)
    extras = extras_of(n, mask, bias, query_segment_ids, key_segment_ids, sinks, seed)
    delta = jnp.einsum("bthd,bthd->bht", output.astype(jnp.float32), grad.astype(jnp.float32))
    saved = Saved(
        query=heads_first(query, n.rows),
        key=heads_first(key, n.columns),
        value=heads_first(value, n.columns),
        grad=heads_first(grad.astype(query.dtype), n.rows),
        logsumexp=rows_of(n, logsumexp, jnp.inf),
        delta=rows_of(n, delta, 0.0),
    )
    grad_key, grad_value = backward_keys(n, settings, saved, extras, interpret=interpret)
    wants_bias = bias is not None and bias_grad
    grad_query, *grad_scores = backward_queries(
        n, settings, saved, heads_first_transposed(key, n.columns), extras, bias_grad=wants_bias, interpret=interpret
    )
    grad_sinks = None
    if sinks is not None:
        taken = jnp.exp(sinks.astype(jnp.float32)[:, None] - logsumexp)
        grad_sinks = -(taken * delta).sum(axis=(0, 2)).astype(sinks.dtype)
    return (
        grad_query[..., : n.length].transpose(0, 3, 1, 2).astype(query.dtype),
        grad_key[:, :, : n.keys].swapaxes(1, 2).astype(key.dtype),
        grad_value[:, :, : n.keys].swapaxes(1, 2).astype(value.dtype),
        None,
        None if bias is None or not wants_bias else _summed_to(bias, grad_scores[0][:, :, : n.keys, : n.length]),
        None,
        None,
        grad_sinks,
        None,
    )


def _summed_to(bias: Array, grad_scores: Array) -> Array:
    """The gradient (B, H, S, T) of the scores, transposed and summed to the shape of the bias."""
    full = (1,) * (4 - bias.ndim) + bias.shape
    axes = tuple(axis for axis, size in enumerate(full) if size == 1)
    return grad_scores.swapaxes(2, 3).sum(axis=axes, keepdims=True).reshape(bias.shape).astype(bias.dtype)


def _bits(array: Array) -> int:
    return array.dtype.itemsize * 8
