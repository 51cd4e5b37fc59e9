"""Flash attention in jax for whichever platform it is lowered for: the Pallas kernel on TPU, xla_flash.py elsewhere.

The arguments and results are those of xla_flash.py. torch_xla's device may be a CPU, and a Pallas kernel for TPU has no
lowering there.
"""

from __future__ import annotations

import functools
from typing import Any

from jax import Array, lax

from easytorch.kernels.attention import pallas_flash, xla_flash


def flash_forward(*arrays: Array | None, **settings: Any) -> tuple[Array, Array]:
    """As `xla_flash.flash_forward`."""
    return _for_platform(pallas_flash.flash_forward, xla_flash.flash_forward, arrays, settings)


def flash_backward(*arrays: Array | None, **settings: Any) -> tuple[Array | None, ...]:
    """As `xla_flash.flash_backward`."""
    return _for_platform(pallas_flash.flash_backward, xla_flash.flash_backward, arrays, settings)


def _for_platform(kernel: Any, definition: Any, arrays: tuple[Array | None, ...], settings: dict[str, Any]) -> Any:
    elsewhere = functools.partial(definition, **settings)
    if any(array is not None and array.size == 0 for array in arrays[:3]):
        return elsewhere(*arrays)
    return lax.platform_dependent(*arrays, tpu=functools.partial(kernel, **settings), default=elsewhere)
