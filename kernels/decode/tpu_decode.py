"""Decoding attention in jax for the platform it is lowered for: the Pallas kernel on TPU, xla_decode.py elsewhere.

torch_xla's device may be a CPU, and a Pallas kernel for TPU has no lowering there.
"""

from __future__ import annotations

from jax import Array, lax

from easytorch.kernels.attention.jax_call import AttentionCall
from easytorch.kernels.decode import pallas_decode, xla_decode


def decode(query: Array, key: Array, value: Array, lengths: Array | None, call: AttentionCall) -> Array:
    """As `xla_decode.decode`."""
    arguments = (query, key, value, lengths, call)
    empty = query.size == 0 or key.size == 0 or value.size == 0
    if empty or pallas_decode.block_of(key, value) is None:
        return xla_decode.decode(*arguments)
    return lax.platform_dependent(*arguments, tpu=pallas_decode.decode, default=xla_decode.decode)
