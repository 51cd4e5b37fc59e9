"""The forward kernel of Pallas flash attention: one program per row tile and column tile, columns innermost."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from easytorch.kernels.attention.jax_call import AttentionCall
from easytorch.kernels.attention.pallas_flash_tiles import (
    CompilerParams,
    Grid,
    column_range,
    given_of,
    is_cut,
    keep_factor,
    matmul,
    numbers_of,
    quotient,
    scalars,
    scores,
    tile,
    within,
)


def forward(
    n: Grid, call: AttentionCall, query: Array, key: Array, value: Array, *, interpret: bool
) -> tuple[Array, Array]:
    """query (B, H, T, D), key (B, K, S, D), value (B, K, Dv, S) -> output (B, H, Dv, T), logsumexp (B, H, 2, T).

    All are padded. The logsumexp is float32, in the parts of logsumexp.py.
    """
    dim, value_dim = query.shape[-1], value.shape[2]

    def column(i: Any, j: Any) -> Any:
        return within(j, column_range(n, call, i), n.column_tiles)

    def tile_of(b: Any, h: Any, i: Any, j: Any) -> tuple[Any, ...]:
        return b, h, column(i, j), i

    specs = AttentionCall(
        mask=None if call.mask is None else tile(call.mask, n.rows, n.columns, tile_of),
        bias=None if call.bias is None else tile(call.bias, n.rows, n.columns, tile_of),
        query_segment_ids=pl.BlockSpec((1, 1, n.rows), lambda b, h, i, j: (b, 0, i)),
        key_segment_ids=pl.BlockSpec((1, n.columns, 1), lambda b, h, i, j: (b, column(i, j), 0)),
        sinks=scalars(),
        seed=scalars(),
    )
    given = given_of(call)
    padded = query.shape[2]
    return pl.pallas_call(
        functools.partial(_kernel, n, numbers_of(call), given),
        grid=(n.batch, n.heads, n.row_tiles, n.column_tiles),
        in_specs=[
            pl.BlockSpec((1, 1, n.rows, dim), lambda b, h, i, j: (b, h, i, 0)),
            pl.BlockSpec((1, 1, n.columns, dim), lambda b, h, i, j: (b, quotient(h, n.group), column(i, j), 0)),
            pl.BlockSpec((1, 1, value_dim, n.columns), lambda b, h, i, j: (b, quotient(h, n.group), 0, column(i, j))),
            *(getattr(specs, name) for name in given),
        ],
        out_specs=[
            pl.BlockSpec((1, 1, value_dim, n.rows), lambda b, h, i, j: (b, h, 0, i)),
            pl.BlockSpec((1, 1, 2, n.rows), lambda b, h, i, j: (b, h, 0, i)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((n.batch, n.heads, value_dim, padded), query.dtype),
            jax.ShapeDtypeStruct((n.batch, n.heads, 2, padded), jnp.float32),
        ],
        scratch_shapes=[
            pltpu.VMEM((1, n.rows), jnp.float32),
            pltpu.VMEM((1, n.rows), jnp.float32),
            pltpu.VMEM((value_dim, n.rows), jnp.float32),
        ],
        compiler_params=CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="flash_forward",
    )(query, key, value, *(getattr(call, name) for name in given))


def _kernel(n: Grid, call: AttentionCall, given: list[str], query: Any, key: Any, value: Any, *references: Any) -> None:
    call = call._replace(**dict(zip(given, references, strict=False)))
    output, logsumexp, m_i, l_i, sums = references[len(given) :]
    batch, head, i, j = (pl.program_id(axis) for axis in range(4))
    first, last = column_range(n, call, i)

    @pl.when(j == 0)
    def _start() -> None:
        sink = -jnp.inf if call.sinks is None else call.sinks[head]
        m_i[...] = jnp.full(m_i.shape, sink, jnp.float32)
        # a sink is a logit already seen
        l_i[...] = jnp.where(m_i[...] == -jnp.inf, 0.0, 1.0)
        sums[...] = jnp.zeros(sums.shape, jnp.float32)

    def step(cut: bool) -> None:
        logits, _ = scores(n, call, query[0, 0], key[0, 0], i, j, cut)
        m_new = jnp.maximum(m_i[...], logits.max(axis=0, keepdims=True))
        # 0 where nothing was seen yet: exp(-inf - 0) is 0, exp(-inf + inf) is not
        finite = jnp.where(m_new == -jnp.inf, 0.0, m_new)
        weights = jnp.exp(logits - finite)
        alpha = jnp.exp(m_i[...] - finite)
        m_i[...] = m_new
        l_i[...] = l_i[...] * alpha + weights.sum(axis=0, keepdims=True)
        if call.seed is not None:
            weights = weights * keep_factor(n, call, batch * n.heads + head, i, j)
        sums[...] = sums[...] * alpha + matmul(value[0, 0], weights.astype(value.dtype))

    visited = (j >= first) & (j < last)
    cut = is_cut(n, call, i, j)
    pl.when(visited & cut)(functools.partial(step, True))
    pl.when(visited & ~cut)(functools.partial(step, False))

    @pl.when(j == n.column_tiles - 1)
    def _end() -> None:
        empty = l_i[...] == 0.0
        divisor = jnp.where(empty, 1.0, l_i[...])
        output[0, 0] = (sums[...] / divisor).astype(output.dtype)
        logsumexp[0, 0, :1] = jnp.where(empty, 0.0, m_i[...])
        logsumexp[0, 0, 1:] = jnp.where(empty, jnp.inf, jnp.log(divisor))
