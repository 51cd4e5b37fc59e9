"""The attentions of a pallas_or_jax.py over the shards of batch and heads: nothing is sent but sums of gradients.

The functions take query, key, value, what an attention has beyond the contract, (B, ...), the call, and in a backward
the results of the forward and the gradient of its output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from easytorch.kernels.attention.call import map_tensors
from easytorch.kernels.attention.jax_call import AttentionCall
from easytorch.kernels.interop.jax_shards import broadcast_layout, over_shards, place_among, summed_over
from easytorch.kernels.interop.spmd import Shards

_HEADS, _ROWS, _RESULTS = "b.h.", "bh..", ("b.h.", "bh..")  # (B, T, H, D), (B, H, T, S), and output and logsumexp
_CALL = {"mask": _ROWS, "bias": _ROWS, "query_segment_ids": "b.", "key_segment_ids": "b.", "sinks": "h", "seed": ""}
_SPREAD = 0x9E3779B9  # 2**32 / the golden ratio: the seeds of neighbouring shards differ in half of their bits


@functools.cache
def forward_over_shards(function: Callable[..., tuple[Array, Array]]) -> Callable[..., tuple[Array, Array]]:
    """`function` with the keyword `shards`."""

    @functools.wraps(function)
    def forward(*given: Any, shards: Shards, **static: Any) -> tuple[Array, Array]:
        def local(*given: Any) -> tuple[Array, Array]:
            return function(*_with_own_seed(given, shards), **static)

        results: tuple[Array, Array] = over_shards(local, shards, given, _layouts(given), _RESULTS)
        return results

    return forward


@functools.cache
def backward_over_shards(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which returns the gradients of query, key, value, bias and sinks, with the keyword `shards`."""

    @functools.wraps(function)
    def backward(*given: Any, shards: Shards, **static: Any) -> Any:
        layouts = _layouts(given)
        of_call = layouts[_place_of_call(given)]

        def local(*given: Any) -> Any:
            dq, dk, dv, dbias, dsinks = function(*_with_own_seed(given, shards), **static)
            if dbias is not None:
                dbias = summed_over(shards, dbias, of_call.bias)
            if dsinks is not None:
                dsinks = summed_over(shards, dsinks, of_call.sinks)
            return dq, dk, dv, dbias, dsinks

        return over_shards(local, shards, given, layouts, (_HEADS, _HEADS, _HEADS, of_call.bias, of_call.sinks))

    return backward


def _place_of_call(given: tuple[Any, ...]) -> int:
    return next(place for place, one in enumerate(given) if isinstance(one, AttentionCall))


def _layouts(given: tuple[Any, ...]) -> tuple[Any, ...]:
    place = _place_of_call(given)
    more = (None if x is None else broadcast_layout(x.shape, "b" + "." * (x.ndim - 1)) for x in given[3:place])
    call = map_tensors(given[place], lambda name, x: broadcast_layout(x.shape, _CALL[name] or "." * x.ndim))
    return (_HEADS, _HEADS, _HEADS, *more, call, *(*_RESULTS, _HEADS)[: len(given) - place - 1])


def _with_own_seed(given: tuple[Any, ...], shards: Shards) -> tuple[Any, ...]:
    """`given` with a seed for each shard: dropout draws by the place in batch and heads, which a shard counts anew."""
    place = _place_of_call(given)
    call: AttentionCall = given[place]
    if call.seed is None:
        return given
    own = call.seed.astype(jnp.uint32) ^ (place_among(shards).astype(jnp.uint32) * jnp.uint32(_SPREAD))
    return (*given[:place], call._replace(seed=own.astype(call.seed.dtype)), *given[place + 1 :])
