"""The fused linear cross entropy in jax: a loop over chunks of rows, whose logits alone are in memory.

The forward pass keeps nothing for the backward pass, which computes each chunk's logits again: what the forward pass
would otherwise keep is a gradient of the weight's size. `chunk.py` has the same formulas in torch.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from easytorch.kernels.interop.jax_shards import over_shards, summed_over
from easytorch.kernels.interop.spmd import Shards

IGNORED = -1  # the label of rows without a loss
_PRECISE = lax.Precision.HIGHEST  # of float32 on a TPU


class Settings(NamedTuple):
    """chunk_size: rows at once, of one device. The others: see native.py."""

    label_smoothing: float
    softcap: float | None
    z_loss: float
    chunk_size: int


def forward(
    hidden: Array, weight: Array, labels: Array, bias: Array | None, *, settings: Settings, shards: Shards | None
) -> tuple[Array]:
    """hidden (N, D), weight (V, D), labels (N,) int32, bias (V,) or None -> the losses (N,) in float32, in a tuple.

    shards: the axes that divide rows ("batch") and vocabulary ("heads"); each device then computes its own part.
    """
    local = functools.partial(_losses, settings=settings, shards=shards)
    if shards is None:
        return (local(hidden, weight, labels, bias),)
    layouts = ("b.", "h.", "b", None if bias is None else "h")
    return (over_shards(local, shards, (hidden, weight, labels, bias), layouts, "b"),)


def backward(
    hidden: Array, weight: Array, labels: Array, bias: Array | None, losses: Array, losses_grad: Array,
    *, settings: Settings, shards: Shards | None,
) -> tuple[Array | None, ...]:  # fmt: skip
    """The gradients of hidden, weight, labels (None) and bias, in their dtypes."""
    local = functools.partial(_gradients, settings=settings, shards=shards)
    given = hidden, weight, labels, bias, losses_grad
    if shards is None:
        found = local(*given)
    else:
        of_bias = None if bias is None else "h"
        found = over_shards(local, shards, given, ("b.", "h.", "b", of_bias, "b"), ("b.", "h.", of_bias))
    return found[0], found[1], None, found[2]


def _losses(
    hidden: Array, weight: Array, labels: Array, bias: Array | None, *, settings: Settings, shards: Shards | None
) -> Array:
    def chunk(carry: None, rows: tuple[Array, ...]) -> tuple[None, Array]:
        return carry, _of_logits(_logits(rows[0], weight, bias, settings)[0], rows[1], settings, shards).losses

    _, losses = lax.scan(chunk, None, _chunks(settings.chunk_size, hidden, labels))
    return losses.reshape(-1)[: labels.shape[0]]


def _gradients(
    hidden: Array, weight: Array, labels: Array, bias: Array | None, losses_grad: Array,
    *, settings: Settings, shards: Shards | None,
) -> tuple[Array, Array, Array | None]:  # fmt: skip
    def chunk(sums: tuple[Array, Array | None], rows: tuple[Array, ...]) -> tuple[Any, Array]:
        part, at, upstream = rows
        logits, slope = _logits(part, weight, bias, settings)
        found = _of_logits(logits, at, settings, shards)
        scale = jnp.where(at == IGNORED, 0.0, upstream.astype(jnp.float32))[:, None]
        grad = found.exponentials / found.total * (1.0 + 2.0 * settings.z_loss * found.log_sum)
        grad = scale * (grad - (1.0 - settings.label_smoothing) * found.here)
        if settings.label_smoothing:
            grad = grad - scale * (settings.label_smoothing / found.vocabulary)
        if slope is not None:
            grad = grad * slope
        narrow = grad.astype(part.dtype)
        hidden_grad = _product("nv,vd->nd", narrow, weight)
        weight_grad = sums[0] + _product("nv,nd->vd", narrow, part)
        bias_grad = None if sums[1] is None else sums[1] + grad.sum(0)
        return (weight_grad, bias_grad), hidden_grad.astype(part.dtype) if shards is None else hidden_grad

    first = jnp.zeros(weight.shape, jnp.float32), None if bias is None else jnp.zeros(bias.shape, jnp.float32)
    (weight_grad, bias_grad), parts = lax.scan(chunk, first, _chunks(settings.chunk_size, hidden, labels, losses_grad))
    hidden_grad = parts.reshape(-1, hidden.shape[1])[: hidden.shape[0]]
    if shards is not None:
        hidden_grad = summed_over(shards, hidden_grad, "b.")
        weight_grad = summed_over(shards, weight_grad, "h.")
        bias_grad = None if bias_grad is None else summed_over(shards, bias_grad, "h")
    narrowed = None if bias is None or bias_grad is None else bias_grad.astype(bias.dtype)
    return hidden_grad.astype(hidden.dtype), weight_grad.astype(weight.dtype), narrowed


def vocabulary_devices(shards: Shards) -> int:
    """How many devices divide the vocabulary."""
    return math.prod(size for name, size in shards.axes if name in shards.heads)


class _Found(NamedTuple):
    """Of a chunk's logits z (n, V): exp(z - largest), its sum (n, 1), log(sum(exp(z))) (n, 1), whether a column is the
    row's label (n, V), the losses (n,), and the size of the vocabulary."""

    exponentials: Array
    total: Array
    log_sum: Array
    here: Array
    losses: Array
    vocabulary: int


def _logits(part: Array, weight: Array, bias: Array | None, settings: Settings) -> tuple[Array, Array | None]:
    """The logits in float32 with the soft cap, and its slope or None; rounded as the product of a linear layer is."""
    z = _product("nd,vd->nv", part, weight)
    if bias is not None:
        z = z + bias
    z = z.astype(part.dtype).astype(jnp.float32)
    if settings.softcap is None:
        return z, None
    bent = jnp.tanh(z / settings.softcap)
    return settings.softcap * bent, 1.0 - jnp.square(bent)


def _of_logits(z: Array, labels: Array, settings: Settings, shards: Shards | None) -> _Found:
    largest = _over_vocabulary(lax.pmax, z.max(1, keepdims=True), shards)
    largest = jnp.where(jnp.isinf(largest), 0.0, largest)
    z = z - largest
    exponentials = jnp.exp(z)
    total = _over_vocabulary(lax.psum, exponentials.sum(1, keepdims=True), shards)
    own = jnp.arange(z.shape[1]) + _first_column(z.shape[1], shards)
    here = own[None, :] == labels[:, None]
    picked = _over_vocabulary(lax.psum, jnp.where(here, z, 0.0).sum(1), shards)
    vocabulary = z.shape[1] * (1 if shards is None else vocabulary_devices(shards))
    smoothing = settings.label_smoothing
    # each term above the largest logit: the logarithm of a sum beside a logit of 1e6 would be rounded away
    log_total = jnp.log(total)
    losses = log_total[:, 0] - (1.0 - smoothing) * picked
    if smoothing:
        losses = losses - smoothing * _over_vocabulary(lax.psum, z.sum(1), shards) / vocabulary
    log_sum = log_total + largest
    if settings.z_loss:
        losses = losses + settings.z_loss * jnp.square(log_sum[:, 0])
    return _Found(exponentials, total, log_sum, here, jnp.where(labels == IGNORED, 0.0, losses), vocabulary)


def _product(subscripts: str, left: Array, right: Array) -> Array:
    return jnp.einsum(subscripts, left, right, precision=_PRECISE, preferred_element_type=jnp.float32)


def _chunks(size: int, hidden: Array, labels: Array, *more: Array) -> tuple[Array, ...]:
    """Each array as (chunks, rows, ...), filled up with rows that have no loss."""
    rows = hidden.shape[0]
    size = max(1, min(size, rows))
    count = -(-rows // size)

    def split(array: Array, value: int) -> Array:
        widths = [(0, count * size - rows)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, widths, constant_values=value).reshape(count, size, *array.shape[1:])

    return split(hidden, 0), split(labels, IGNORED), *(split(one, 0) for one in more)


def _over_vocabulary(reduce: Any, array: Array, shards: Shards | None) -> Array:
    result: Array = reduce(array, shards.heads) if shards is not None and shards.heads else array
    return result


def _first_column(own: int, shards: Shards | None) -> Array | int:
    """The number of the first column that is this device's."""
    return lax.axis_index(shards.heads) * own if shards is not None and shards.heads else 0
