"""torch <-> jax on the CPU through DLPack: no copy where the layout allows, no narrowed dtype, no dangling buffer.

jax sees the memory of a contiguous torch tensor that starts on 64 bytes, as torch's allocations do; other layouts are
copied once. The array holds a reference to the tensor's storage, the tensor one to the array's buffer.
"""

from __future__ import annotations

import jax
import torch
from torch.utils.dlpack import from_dlpack


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """The tensor as a jax array on the CPU, of the same shape and dtype. jax must be done with it before it is mutated.

    Raises `ValueError` for a tensor that is not on the CPU, `TypeError` for a dtype jax would narrow or does not have.
    """
    if tensor.device.type != "cpu":
        raise ValueError(f"to_jax takes CPU tensors, got one on {tensor.device}")
    if tensor.dtype in _WIDE and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise TypeError(f"jax would narrow {tensor.dtype} to 32 bits: cast it, or set jax_enable_x64")
    plain = tensor.detach().resolve_conj().resolve_neg()
    return jax.dlpack.from_dlpack(plain.contiguous())


_WIDE = (torch.int64, torch.uint64, torch.float64, torch.complex128)


def to_torch(array: jax.Array) -> torch.Tensor:
    """The array, once it is computed, as a tensor that keeps its memory alive; a mutation of one shows in the other."""
    return from_dlpack(array.block_until_ready())
