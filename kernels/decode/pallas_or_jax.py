"""Decoding attention in jax for the platform it is lowered for: the Pallas kernel on TPU, jax_native.py elsewhere.

torch_xla's device may be a CPU, and a Pallas kernel for TPU has no lowering there.
"""

from __future__ import annotations

from jax import Array, lax

from easytorch.kernels.attention.jax_call import AttentionCall
from easytorch.kernels.decode import jax_native, pallas_kernel


def decode(query: Array, key: Array, value: Array, lengths: Array | None, call: AttentionCall) -> Array:
    """As `jax_native.decode`."""
    arguments = (query, key, value, lengths, call)
    empty = query.size == 0 or key.size == 0 or value.size == 0
    if empty or pallas_kernel.block_of(key, value) is None:
        return jax_native.decode(*arguments)
    return lax.platform_dependent(*arguments, tpu=pallas_kernel.decode, default=jax_native.decode)
