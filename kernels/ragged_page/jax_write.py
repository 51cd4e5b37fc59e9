"""Writing into pages in jax, for torch_xla: returns a new array, which XLA updates in place where nothing else uses the
old one."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def write_page(pages: Array, rows: Array, slots: Array) -> Array:
    """Row i of rows (N, ...) into slot slots[i] (N,) of pages (P, page_size, ...); -1 is skipped."""
    page_count, page_size = pages.shape[:2]
    # a negative index would count from the end; one out of range is dropped
    page = jnp.where(slots < 0, page_count, slots // page_size)
    return pages.at[page, slots % page_size].set(rows, mode="drop")
