"""Block-sparse attention in jax for whichever platform it is lowered for: Pallas on TPU, plain jax elsewhere.

torch_xla's device may be a CPU, where a Pallas kernel for TPU has no lowering: there xla_flash.py runs under the mask
that the structure implies.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from easytorch.kernels.attention import xla_flash
from easytorch.kernels.attention.xla_flash_tiles import sizes_of
from easytorch.kernels.blocksparse import pallas_blocksparse
from easytorch.kernels.blocksparse.pallas_map import Rule


def blocksparse_forward(*arrays: Array | None, **settings: Any) -> tuple[Array, Array]:
    """As `pallas_blocksparse.blocksparse_forward`, of any sizes."""
    return _for_platform(pallas_blocksparse.blocksparse_forward, definition_forward, arrays, settings)


def blocksparse_backward(*arrays: Array | None, **settings: Any) -> tuple[Array | None, ...]:
    """As `pallas_blocksparse.blocksparse_backward`, of any sizes."""
    return _for_platform(pallas_blocksparse.blocksparse_backward, definition_backward, arrays, settings)


def definition_forward(*arrays: Array | None, rule: Rule, **settings: Any) -> tuple[Array, Array]:
    """xla_flash.py under the structure's mask, with the arguments of `blocksparse_forward`."""
    return xla_flash.flash_forward(*_masked(arrays, rule), **settings)


def definition_backward(*arrays: Array | None, rule: Rule, **settings: Any) -> tuple[Array | None, ...]:
    """xla_flash.py under the structure's mask, with the arguments of `blocksparse_backward`."""
    return *xla_flash.flash_backward(*_masked(arrays, rule), *arrays[10:], **settings), None


def _masked(arrays: tuple[Array | None, ...], rule: Rule) -> list[Array | None]:
    """The first nine arrays, with the structure in the mask."""
    query, key, _, mask, *rest = (*arrays, *[None] * (10 - len(arrays)))[:10]
    assert query is not None and key is not None
    begin, end = pallas_blocksparse.intervals_of(sizes_of(query, key), rule, rest[-1])
    column = jnp.arange(key.shape[1])
    seen = ((column >= begin[..., None]) & (column < end[..., None]))[:, None]
    return [*arrays[:3], seen if mask is None else seen & mask, *rest[:-1]]


def _for_platform(kernel: Any, definition: Any, arrays: tuple[Array | None, ...], settings: dict[str, Any]) -> Any:
    elsewhere = functools.partial(definition, **settings)
    if any(array is not None and array.size == 0 for array in arrays[:3]):
        return elsewhere(*arrays)
    return lax.platform_dependent(*arrays, tpu=functools.partial(kernel, **settings), default=elsewhere)
