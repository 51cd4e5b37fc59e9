"""Rotary position embedding on TPU in Pallas: one pass over the heads as they leave their projection, (B, T, H * D).

There a token's heads fill whole vectors of 128 lanes. Each feature's partner is a fixed number of lanes away, so one or
two lane rotations suffice, for both layouts and partial rotation. XLA's own program for native.py moves 6 times the
bytes of one pass (bfloat16, 32 and 8 heads of 128; docs/kernels/tpu.md).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
# Bytes of a block of heads: input and output, double-buffered, and the temporaries stay below 16 MiB.
BLOCK_BYTES = 1 << 20
TOKENS = (512, 256, 128, 64, 32)


DTYPES = (jnp.float32, jnp.bfloat16)  # Mosaic cannot load float16


def lanes_of(x: Array) -> int | None:
    """The lanes after which vectors and heads of x (B, T, H, D) align again; None where the kernel does not support
    x."""
    if x.size == 0 or x.dtype not in DTYPES:
        return None
    lanes = math.lcm(x.shape[3], LANES)
    return None if x.shape[2] * x.shape[3] % lanes else lanes


def turn(
    x: Array, cos: Array, sin: Array, *, interleaved: bool = False, back: bool = False, interpret: bool = False
) -> Array:
    """As `jax_native.turn`, for x that has `lanes_of`. interpret: by Pallas's interpreter."""
    batch, length, heads, dim = x.shape
    width, lanes = heads * dim, lanes_of(x)
    assert lanes is not None, "heads that do not fill whole vectors are jax_native's"
    columns = next((n for n in (8, 4, 2) if lanes * n <= 4096 and width % (lanes * n) == 0), 1) * lanes
    row = columns * x.dtype.itemsize
    tokens = min(next((n for n in TOKENS if n * row <= BLOCK_BYTES), TOKENS[-1]), length)
    tables = _tables(cos, sin, dim, interleaved, back, lanes)
    heads_spec = pl.BlockSpec((1, tokens, columns), lambda b, t, c: (b, t, c))
    whole = cos.shape[0] == 1
    table_spec = pl.BlockSpec((1, tokens, lanes), lambda b, t, c: (0 if whole else b, t, 0))
    distance = 1 if interleaved else cos.shape[2] // 2
    moved = 2 * x.size * x.dtype.itemsize + sum(table.size * table.dtype.itemsize for table in tables)
    turned = pl.pallas_call(
        functools.partial(_kernel, distance, dim, interleaved),
        grid=(batch, pl.cdiv(length, tokens), width // columns),
        in_specs=[heads_spec, table_spec, table_spec],
        out_specs=heads_spec,
        out_shape=jax.ShapeDtypeStruct((batch, length, width), x.dtype),
        cost_estimate=pl.CostEstimate(flops=4 * x.size, transcendentals=0, bytes_accessed=moved),
        interpret=interpret,
        compiler_params=_COMPILER_PARAMS(dimension_semantics=("parallel",) * 3),
    )(x.reshape(batch, length, width), *tables)
    return turned.reshape(x.shape)


def _tables(cos: Array, sin: Array, dim: int, interleaved: bool, back: bool, lanes: int) -> tuple[Array, Array]:
    """(B or 1, T, R) -> (B or 1, T, lanes): the factors of a feature and of its partner, repeated for each head."""
    rotated = cos.shape[2]
    half = rotated // 2
    cos, sin = (table if table.dtype in DTYPES else table.astype(jnp.float32) for table in (cos, sin))
    if interleaved:
        cos, sin = (jnp.repeat(table[..., :half], 2, axis=-1) for table in (cos, sin))
        sin = jnp.where(jnp.arange(rotated) % 2 == (1 if back else 0), -sin, sin)
    elif back:  # the partner's own entry of the table
        sin = jnp.concatenate([sin[..., half:], -sin[..., :half]], axis=-1)
    else:
        sin = jnp.concatenate([-sin[..., :half], sin[..., half:]], axis=-1)
    rest = ((0, 0), (0, 0), (0, dim - rotated))
    cos, sin = jnp.pad(cos, rest, constant_values=1), jnp.pad(sin, rest)
    return jnp.tile(cos, lanes // dim), jnp.tile(sin, lanes // dim)


def _kernel(distance: int, dim: int, interleaved: bool, x: Any, cos: Any, sin: Any, output: Any) -> None:
    lanes = cos.shape[2]
    c, s = cos[0].astype(jnp.float32), sin[0].astype(jnp.float32)
    lane = lax.broadcasted_iota(jnp.int32, c.shape, 1)
    feature = lax.rem(lane, jnp.int32(dim))
    first = lax.rem(feature, jnp.int32(2)) == 0 if interleaved else feature < distance
    for start in range(0, x.shape[2], lanes):
        here = x[0, :, start : start + lanes].astype(jnp.float32)
        ahead = pltpu.roll(here, lanes - distance, 1)
        partner = ahead if 2 * distance == lanes else jnp.where(first, ahead, pltpu.roll(here, distance, 1))
        output[0, :, start : start + lanes] = (here * c + partner * s).astype(output.dtype)


_COMPILER_PARAMS: Any = pltpu.CompilerParams
