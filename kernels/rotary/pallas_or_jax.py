"""Rotary in jax for the platform it is lowered for: the Pallas kernel on TPU, jax_native.py elsewhere.

torch_xla's device may be a CPU, and a Pallas kernel for TPU has no lowering there.
"""

from __future__ import annotations

import functools

from jax import Array, lax

from easytorch.kernels.interop.jax_shards import broadcast_layout, over_shards
from easytorch.kernels.interop.spmd import Shards
from easytorch.kernels.rotary import jax_native, pallas_kernel


def rotary(
    query: Array, key: Array, cos: Array, sin: Array, *, interleaved: bool = False, back: bool = False
) -> tuple[Array, Array]:
    """query (B, T, H, D), key (B, T, K, D), cos and sin (B or 1, T, R) -> both rotated; back: gradients, rotated
    back."""
    return (
        _turn(query, cos, sin, interleaved=interleaved, back=back),
        _turn(key, cos, sin, interleaved=interleaved, back=back),
    )


def rotary_over_shards(
    query: Array, key: Array, cos: Array, sin: Array, *, shards: Shards, interleaved: bool = False, back: bool = False
) -> tuple[Array, Array]:
    """The same, each device computing its own shards of batch and heads."""
    heads, table = "b.h.", broadcast_layout(cos.shape, "b..")
    local = functools.partial(rotary, interleaved=interleaved, back=back)
    given, layouts = (query, key, cos, sin), (heads, heads, table, table)
    turned: tuple[Array, Array] = over_shards(local, shards, given, layouts, (heads, heads))
    return turned


def _turn(x: Array, cos: Array, sin: Array, *, interleaved: bool, back: bool) -> Array:
    elsewhere = functools.partial(jax_native.turn, interleaved=interleaved, back=back)
    if pallas_kernel.lanes_of(x) is None or cos.shape[2] == 0:
        return elsewhere(x, cos, sin)
    kernel = functools.partial(pallas_kernel.turn, interleaved=interleaved, back=back)
    return lax.platform_dependent(x, cos, sin, tpu=kernel, default=elsewhere)
