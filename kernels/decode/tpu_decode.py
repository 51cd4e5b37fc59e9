"""Decoding attention in jax for the platform it is lowered for: the Pallas kernel on TPU, xla_decode.py elsewhere.

torch_xla's device may be a CPU, and a Pallas kernel for TPU has no lowering there.
"""

from __future__ import annotations

import functools
from typing import Any

from jax import Array, lax

from easytorch.kernels.decode import pallas_decode, xla_decode


def decode(query: Array, key: Array, value: Array, *features: Array | None, **settings: Any) -> Array:
    """As `xla_decode.decode`."""
    elsewhere = functools.partial(xla_decode.decode, **settings)
    empty = query.size == 0 or key.size == 0 or value.size == 0
    if empty or pallas_decode.block_of(key, value) is None:
        return elsewhere(query, key, value, *features)
    kernel = functools.partial(pallas_decode.decode, **settings)
    return lax.platform_dependent(query, key, value, *features, tpu=kernel, default=elsewhere)
