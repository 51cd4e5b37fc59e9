"""Flash attention in jax for the platform it is lowered for: the Pallas kernel on TPU, jax_flash.py elsewhere.

The arguments and results are those of jax_flash.py. torch_xla's device may be a CPU, and a Pallas kernel for TPU has no
lowering there.
"""

from __future__ import annotations

import functools
from typing import Any

from jax import Array, lax

from easytorch.kernels.attention import jax_flash, pallas_flash
from easytorch.kernels.attention.jax_call import AttentionCall


def flash_forward(query: Array, key: Array, value: Array, call: AttentionCall) -> tuple[Array, Array]:
    """As `jax_flash.flash_forward`."""
    return for_platform(pallas_flash.flash_forward, jax_flash.flash_forward, query, key, value, call)


def flash_backward(
    query: Array, key: Array, value: Array, call: AttentionCall, output: Array, logsumexp: Array, grad: Array,
    *, bias_grad: bool = True,
) -> tuple[Array, Array, Array, Array | None, Array | None]:  # fmt: skip
    """As `jax_flash.flash_backward`."""
    kernel, definition = (
        functools.partial(module.flash_backward, bias_grad=bias_grad) for module in (pallas_flash, jax_flash)
    )
    return for_platform(kernel, definition, query, key, value, call, output, logsumexp, grad)


def for_platform(kernel: Any, definition: Any, query: Array, key: Array, value: Array, *rest: Any) -> Any:
    """`kernel` where it is lowered for TPU and no array is empty, else `definition`."""
    if query.size == 0 or key.size == 0 or value.size == 0:
        return definition(query, key, value, *rest)
    return lax.platform_dependent(query, key, value, *rest, tpu=kernel, default=definition)
