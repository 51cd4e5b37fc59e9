"""Attention over pages in jax for whichever platform it is lowered for: the Pallas kernel on TPU, xla_ragged.py
elsewhere and where the kernel does not take the shapes.

The arguments are those of xla_ragged.py. torch_xla's device may be a CPU, and a Pallas kernel for TPU has no lowering
there.
"""

from __future__ import annotations

import functools
from typing import Any

from jax import Array, lax

from easytorch.kernels.ragged_page import pallas_ragged, xla_ragged


def ragged_page_attention(*arrays: Array | None, **settings: Any) -> Array:
    """As `xla_ragged.ragged_page_attention`."""
    elsewhere = functools.partial(xla_ragged.ragged_page_attention, **settings)
    empty = any(array is not None and array.size == 0 for array in arrays)
    if empty or pallas_ragged.supports(*arrays[:7]) is not None:  # type: ignore[arg-type]
        return elsewhere(*arrays)
    kernel = functools.partial(pallas_ragged.ragged_page_attention, **settings)
    return lax.platform_dependent(*arrays, tpu=kernel, default=elsewhere)
