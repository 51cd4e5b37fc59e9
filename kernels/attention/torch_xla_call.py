"""jax functions of an `AttentionCall` as nodes of a torch_xla graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from easytorch.kernels.attention.call import (
    DIFFERENTIABLE,
    TENSORS,
    AttentionCall,
    flatten,
    gradients_by_field,
    unflatten,
)
from easytorch.kernels.interop.spmd import shards_of
from easytorch.kernels.interop.xla_bridge import call_jax, call_jax_with_gradient


def call_jax_on(function: Callable[..., Any], call: AttentionCall, *tensors: Tensor | None, **static: Any) -> Any:
    """`function(*tensors, call, **static)`, which computes no gradient."""
    call = _for_jax(call, tensors)
    return call_jax(_flat(function, len(tensors)), *tensors, *call.tensors, numbers=call.numbers, **static)


def call_jax_on_with_gradient(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    call: AttentionCall,
    *tensors: Tensor | None,
    **static: Any,
) -> Any:
    """The first result of `forward(*tensors, call, **static)`, of which the second is kept for the backward.

    backward(*tensors, call, *results, grad, **static) -> gradients of query, key, value and `DIFFERENTIABLE`. What
    `tensors` holds beyond query, key and value has no gradient.
    """
    call = _for_jax(call, tensors)
    count = len(tensors)
    return call_jax_with_gradient(
        _flat(forward, count),
        _flat_gradients(backward, count),
        *tensors,
        *call.tensors,
        numbers=call.numbers,
        **static,
    )


def call_jax_over_shards_with_gradient(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    call: AttentionCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *more: Tensor | None,
    **static: Any,
) -> Any:
    """`call_jax_on_with_gradient`; under SPMD each device computes its own shards of batch and heads.

    forward, backward: as kernels/attention/jax_shards.py takes them.
    """
    if (shards := shards_of(query.shape[0], query.shape[2], key.shape[2])) is not None:
        from easytorch.kernels.attention.jax_shards import backward_over_shards, forward_over_shards

        forward, backward = forward_over_shards(forward), backward_over_shards(backward)
        static["shards"] = shards
    return call_jax_on_with_gradient(forward, backward, call, query, key, value, *more, **static)


def _for_jax(call: AttentionCall, tensors: tuple[Tensor | None, ...]) -> AttentionCall:
    """32-bit integers, and the seed as an input of the graph, not a constant: a new one must not recompile."""
    device = next(x.device for x in tensors if x is not None)
    query_ids, key_ids, seed = call.query_segment_ids, call.key_segment_ids, call.seed
    call = call._replace(
        query_segment_ids=None if query_ids is None else query_ids.to(torch.int32),
        key_segment_ids=None if key_ids is None else key_ids.to(torch.int32),
        seed=None if seed is None else seed.to(torch.int32).to(device),
    )
    return unflatten(flatten(call))


@functools.cache
def _flat(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """`function` with the call's tensors among its arrays and the numbers as a static argument; cached, so that it is
    lowered once."""

    @functools.wraps(function)
    def flat(*arrays: Any, numbers: tuple[Any, ...], **static: Any) -> Any:
        from easytorch.kernels.attention.jax_call import AttentionCall

        call = AttentionCall(*arrays[count : count + TENSORS], *numbers)
        return function(*arrays[:count], call, *arrays[count + TENSORS :], **static)

    return flat


@functools.cache
def _flat_gradients(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """`_flat` of a backward, with a gradient or None for each of the tensors."""

    @functools.wraps(function)
    def flat(*arrays: Any, **settings: Any) -> Any:
        results = _flat(function, count)(*arrays, **settings)
        fields = gradients_by_field(dict(zip(DIFFERENTIABLE, results[3:], strict=True)))[:TENSORS]
        return *results[:3], *(None,) * (count - 3), *fields

    return flat
