"""The forward kernel on TPU: online softmax along a walk (pallas_map.py) over the tiles that are needed.

Tiles stand transposed, as in kernels/attention/pallas_flash_tiles.py, which says why.
"""

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
    given_of,
    keep_factor,
    matmul,
    numbers_of,
    quotient,
    scalars,
    tile,
)
from easytorch.kernels.blocksparse.pallas_map import FULL, PARTIAL, Walk
from easytorch.kernels.blocksparse.pallas_tiles import interval_spec, seen_scores, step_of


def forward(
    n: Grid, call: AttentionCall, walk: Walk, query: Array, key: Array, value: Array, begin: Array, end: Array,
    *, interpret: bool,
) -> tuple[Array, Array]:  # fmt: skip
    """query (B, H, T, D), key (B, K, S, D), value (B, K, Dv, S) -> output (B, H, Dv, T), logsumexp (B, H, 2, T).

    begin, end: int32 (B or 1, 1, T). All are padded. The logsumexp is float32, in the parts of logsumexp.py.
    """
    dim, value_dim = query.shape[-1], value.shape[2]

    def row(s: Any, owners: Any) -> Any:
        return owners[s + 1]

    def column(b: Any, s: Any, tiles: Any) -> Any:
        return step_of(tiles, b, s).tile

    def tile_of(b: Any, h: Any, s: Any, owners: Any, tiles: Any) -> tuple[Any, ...]:
        return b, h, column(b, s, tiles), row(s, owners)

    specs = AttentionCall(
        mask=None if call.mask is None else tile(call.mask, n.rows, n.columns, tile_of),
        bias=None if call.bias is None else tile(call.bias, n.rows, n.columns, tile_of),
        query_segment_ids=pl.BlockSpec((1, 1, n.rows), lambda b, h, s, o, t: (b, 0, row(s, o))),
        key_segment_ids=pl.BlockSpec((1, n.columns, 1), lambda b, h, s, o, t: (b, column(b, s, t), 0)),
        sinks=scalars(),
        seed=scalars(),
    )
    given = given_of(call)
    interval = interval_spec(n, begin, lambda b, h, s, o, t: (b, row(s, o)))
    padded = query.shape[2]
    return pl.pallas_call(
        functools.partial(_kernel, n, numbers_of(call), given),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(n.batch, n.heads, walk.steps),
            in_specs=[
                pl.BlockSpec((1, 1, n.rows, dim), lambda b, h, s, o, t: (b, h, row(s, o), 0)),
                pl.BlockSpec(
                    (1, 1, n.columns, dim), lambda b, h, s, o, t: (b, quotient(h, n.group), column(b, s, t), 0)
                ),
                pl.BlockSpec(
                    (1, 1, value_dim, n.columns), lambda b, h, s, o, t: (b, quotient(h, n.group), 0, column(b, s, t))
                ),
                interval,
                interval,
                *(getattr(specs, name) for name in given),
            ],
            out_specs=[
                pl.BlockSpec((1, 1, value_dim, n.rows), lambda b, h, s, o, t: (b, h, 0, row(s, o))),
                pl.BlockSpec((1, 1, 2, n.rows), lambda b, h, s, o, t: (b, h, 0, row(s, o))),
            ],
            scratch_shapes=[
                pltpu.VMEM((1, n.rows), jnp.float32),
                pltpu.VMEM((1, n.rows), jnp.float32),
                pltpu.VMEM((value_dim, n.rows), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((n.batch, n.heads, value_dim, padded), query.dtype),
            jax.ShapeDtypeStruct((n.batch, n.heads, 2, padded), jnp.float32),
        ],
        compiler_params=CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="blocksparse_forward",
    )(*walk, query, key, value, begin, end, *(getattr(call, name) for name in given))


def _kernel(
    n: Grid, call: AttentionCall, given: list[str], owners: Any, tiles: Any, query: Any, key: Any, value: Any,
    begin: Any, end: Any, *references: Any,
) -> None:  # fmt: skip
    call = call._replace(**dict(zip(given, references, strict=False)))
    output, logsumexp, m_i, l_i, sums = references[len(given) :]
    batch, head, s = (pl.program_id(axis) for axis in range(3))
    i, (j, state) = owners[s + 1], step_of(tiles, batch, s)

    @pl.when(owners[s] != i)
    def _start() -> None:
        sink = -jnp.inf if call.sinks is None else call.sinks[head]
        m_i[...] = jnp.full(m_i.shape, sink, jnp.float32)
        # a sink is a logit already seen
        l_i[...] = jnp.where(m_i[...] == -jnp.inf, 0.0, 1.0)
        sums[...] = jnp.zeros(sums.shape, jnp.float32)

    def step(partial: bool) -> None:
        logits, _ = seen_scores(n, call, query[0, 0], key[0, 0], begin[0], end[0], i, j, partial)
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

    pl.when(state == PARTIAL)(functools.partial(step, True))
    pl.when(state == FULL)(functools.partial(step, False))

    @pl.when(owners[s + 2] != i)
    def _end() -> None:
        empty = l_i[...] == 0.0
        divisor = jnp.where(empty, 1.0, l_i[...])
        output[0, 0] = (sums[...] / divisor).astype(output.dtype)
        logsumexp[0, 0, :1] = jnp.where(empty, 0.0, m_i[...])
        logsumexp[0, 0, 1:] = jnp.where(empty, jnp.inf, jnp.log(divisor))
