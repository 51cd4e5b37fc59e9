"""Rotary position embedding in plain jax; see native.py. The Pallas kernel (pallas_kernel.py) is tested against it."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def turn(x: Array, cos: Array, sin: Array, *, interleaved: bool = False, back: bool = False) -> Array:
    """x (B, T, H, D), cos and sin (B or 1, T, R) -> x turned, in its dtype; back: a gradient of the result turned back.

    Formed in float32 (float64 for float64) and rounded once. Interleaved, the second halves of the tables are not read.
    """
    rotated = cos.shape[2]
    half = rotated // 2
    wide = jnp.promote_types(x.dtype, jnp.float32)
    cos, sin = (table[:, :, None].astype(wide) for table in (cos, sin))
    c_low, s_low = cos[..., :half], sin[..., :half]
    c_high, s_high = (c_low, s_low) if interleaved else (cos[..., half:], sin[..., half:])
    turned = x[..., :rotated].astype(wide)
    low, high = (turned[..., ::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    if back:
        low, high = low * c_low + high * s_high, high * c_high - low * s_low
    else:
        low, high = low * c_low - high * s_low, high * c_high + low * s_high
    pair = jnp.stack((low, high), -1).reshape(turned.shape) if interleaved else jnp.concatenate((low, high), -1)
    return jnp.concatenate((pair.astype(x.dtype), x[..., rotated:]), -1)
