"""Block-sparse attention in jax for the platform it is lowered for: Pallas on TPU, plain jax elsewhere.

torch_xla's device may be a CPU, where a Pallas kernel for TPU has no lowering: there attention/jax_flash.py runs under
the mask that the structure implies.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import Array

from easytorch.kernels.attention import jax_flash
from easytorch.kernels.attention.jax_call import AttentionCall
from easytorch.kernels.attention.jax_flash_tiles import tile_grid
from easytorch.kernels.attention.pallas_or_jax import for_platform
from easytorch.kernels.blocksparse import pallas_attention
from easytorch.kernels.blocksparse.structure import Rule


def blocksparse_forward(
    query: Array, key: Array, value: Array, prefix: Array | None, call: AttentionCall, *, rule: Rule
) -> tuple[Array, Array]:
    """As `pallas_attention.blocksparse_forward`, of any sizes."""
    kernel, definition = (
        functools.partial(function, rule=rule)
        for function in (pallas_attention.blocksparse_forward, definition_forward)
    )
    return for_platform(kernel, definition, query, key, value, call, prefix)


def blocksparse_backward(
    query: Array, key: Array, value: Array, prefix: Array | None, call: AttentionCall, *results: Array, rule: Rule
) -> tuple[Array, Array, Array, Array | None, Array | None]:
    """As `pallas_attention.blocksparse_backward`, of any sizes."""
    kernel, definition = (
        functools.partial(function, rule=rule)
        for function in (pallas_attention.blocksparse_backward, definition_backward)
    )
    return for_platform(kernel, definition, query, key, value, call, prefix, *results)


def definition_forward(
    query: Array, key: Array, value: Array, call: AttentionCall, prefix: Array | None, *, rule: Rule
) -> tuple[Array, Array]:
    """attention/jax_flash.py under the structure's mask, with the arguments of `blocksparse_forward`."""
    return jax_flash.flash_forward(query, key, value, _masked(query, key, call, prefix, rule))


def definition_backward(
    query: Array, key: Array, value: Array, call: AttentionCall, prefix: Array | None, *results: Array, rule: Rule
) -> tuple[Array, Array, Array, Array | None, Array | None]:
    """attention/jax_flash.py under the structure's mask, with the arguments of `blocksparse_backward`."""
    return jax_flash.flash_backward(query, key, value, _masked(query, key, call, prefix, rule), *results)


def _masked(query: Array, key: Array, call: AttentionCall, prefix: Array | None, rule: Rule) -> AttentionCall:
    """The call with the structure in its mask, instead of in its band."""
    begin, end = pallas_attention.intervals_of(tile_grid(query, key), rule, prefix)
    column = jnp.arange(key.shape[1])
    seen = ((column >= begin[..., None]) & (column < end[..., None]))[:, None]
    return call._replace(mask=seen if call.mask is None else seen & call.mask, left=None, right=None)
