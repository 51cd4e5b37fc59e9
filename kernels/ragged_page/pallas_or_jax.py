"""Attention over pages in jax: the Pallas kernel where it is lowered for a TPU and takes the shapes, else jax_pages.py.

The arguments are those of jax_pages.py. torch_xla's device may be a CPU, and a Pallas kernel for TPU has no lowering
there.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import Array, lax

from easytorch.kernels.ragged_page import jax_pages, pallas_kernel


def ragged_page_attention(*arguments: Any, value_dim: int) -> Array:
    """As `jax_pages.ragged_page_attention`."""
    elsewhere = functools.partial(jax_pages.ragged_page_attention, value_dim=value_dim)
    empty = any(array.size == 0 for array in jax.tree.leaves(arguments))
    if empty or pallas_kernel.supports(*arguments[:7]) is not None:
        return elsewhere(*arguments)
    kernel = functools.partial(pallas_kernel.ragged_page_attention, value_dim=value_dim)
    return lax.platform_dependent(*arguments, tpu=kernel, default=elsewhere)
