"""The backward function of a jax function, as `xla_bridge.call_jax_with_gradient` asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def backward_of(function: Callable[..., Any], tensors: int) -> Callable[..., tuple[Any, ...]]:
    """A function of the `tensors` first arguments of `function`, its two outputs and their gradients: one gradient, or
    None, for each of the tensors. It runs `function` again, whose own `jax.checkpoint` decides what is kept."""

    def backward(*arguments: Any, **static: Any) -> tuple[Any, ...]:
        inputs, grads = arguments[:tensors], arguments[tensors + 2 :]
        index = [i for i, x in enumerate(inputs) if x is not None and jnp.issubdtype(x.dtype, jnp.floating)]

        def restricted(*leaves: Any) -> Any:
            given = list(inputs)
            for i, leaf in zip(index, leaves, strict=True):
                given[i] = leaf
            return function(*given, **static)

        found = dict(zip(index, jax.vjp(restricted, *(inputs[i] for i in index))[1](tuple(grads)), strict=True))
        return tuple(found.get(i) for i in range(tensors))

    backward.__name__ = f"{function.__name__}_backward"
    return backward
