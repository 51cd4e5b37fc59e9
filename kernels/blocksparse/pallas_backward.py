"""The backward kernels on TPU: dK and dV along a walk by column tiles, then dQ and the bias along one by row tiles."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from easytorch.kernels.attention.jax_call import AttentionCall
from easytorch.kernels.attention.pallas_flash_backward import Saved
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
from easytorch.kernels.blocksparse.pallas_map import EMPTY, FULL, PARTIAL, Walk
from easytorch.kernels.blocksparse.pallas_tiles import interval_spec, seen_scores, step_of


def backward_keys(
    n: Grid, call: AttentionCall, walk: Walk, saved: Saved, begin: Array, end: Array, *, interpret: bool
) -> tuple[Array, Array]:
    """dK (B, K, S, D) and dV (B, K, S, Dv), in float32, summed over the query heads that read a key head."""
    dim, value_dim = saved.key.shape[-1], saved.value.shape[-1]

    def row(b: Any, s: Any, tiles: Any) -> Any:
        return step_of(tiles, b, s).tile

    def head(b: Any, k: Any, s: Any, g: Any, tiles: Any) -> Any:
        # an empty step stays at the last head of the step before: nothing is fetched for it
        return k * n.group + jnp.where(step_of(tiles, b, s).state == EMPTY, n.group - 1, g)

    def rows_spec(width: int) -> Any:
        return pl.BlockSpec((1, 1, n.rows, width), lambda b, k, s, g, o, t: (b, head(b, k, s, g, t), row(b, s, t), 0))

    def columns_spec(width: int) -> Any:
        return pl.BlockSpec((1, 1, n.columns, width), lambda b, k, s, g, o, t: (b, k, o[s + 1], 0))

    def tile_of(b: Any, k: Any, s: Any, g: Any, o: Any, t: Any) -> tuple[Any, ...]:
        return b, head(b, k, s, g, t), o[s + 1], row(b, s, t)

    vector = pl.BlockSpec((1, 1, 1, n.rows), lambda b, k, s, g, o, t: (b, head(b, k, s, g, t), 0, row(b, s, t)))
    parts = pl.BlockSpec((1, 1, 2, n.rows), lambda b, k, s, g, o, t: (b, head(b, k, s, g, t), 0, row(b, s, t)))
    specs = AttentionCall(
        mask=None if call.mask is None else tile(call.mask, n.rows, n.columns, tile_of),
        bias=None if call.bias is None else tile(call.bias, n.rows, n.columns, tile_of),
        query_segment_ids=pl.BlockSpec((1, 1, n.rows), lambda b, k, s, g, o, t: (b, 0, row(b, s, t))),
        key_segment_ids=pl.BlockSpec((1, n.columns, 1), lambda b, k, s, g, o, t: (b, o[s + 1], 0)),
        seed=scalars(),
    )
    given = given_of(call, backward=True)
    interval = interval_spec(n, begin, lambda b, k, s, g, o, t: (b, row(b, s, t)))
    padded = saved.key.shape[2]
    return pl.pallas_call(
        functools.partial(_keys_kernel, n, numbers_of(call), given),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(n.batch, n.kv_heads, walk.steps, n.group),
            in_specs=[
                rows_spec(dim), columns_spec(dim), columns_spec(value_dim), rows_spec(value_dim), parts, vector,
                interval, interval, *(getattr(specs, name) for name in given),
            ],
            out_specs=[columns_spec(dim), columns_spec(value_dim)],
            scratch_shapes=[pltpu.VMEM((n.columns, width), jnp.float32) for width in (dim, value_dim)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((n.batch, n.kv_heads, padded, width), jnp.float32) for width in (dim, value_dim)
        ],
        compiler_params=CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary")),
        interpret=interpret,
        name="blocksparse_backward_keys",
    )(*walk, *saved, begin, end, *(getattr(call, name) for name in given))  # fmt: skip


def _keys_kernel(n: Grid, call: AttentionCall, given: list[str], owners: Any, tiles: Any, *references: Any) -> None:
    saved, (begin, end) = Saved(*references[:6]), references[6:8]
    call = call._replace(**dict(zip(given, references[8:], strict=False)))
    grad_key, grad_value, sum_key, sum_value = references[8 + len(given) :]
    batch, kv_head, s, g = (pl.program_id(axis) for axis in range(4))
    j, (i, state) = owners[s + 1], step_of(tiles, batch, s)
    head = batch * n.heads + kv_head * n.group + g

    @pl.when((owners[s] != j) & (g == 0))
    def _start() -> None:
        sum_key[...] = jnp.zeros(sum_key.shape, jnp.float32)
        sum_value[...] = jnp.zeros(sum_value.shape, jnp.float32)

    def step(partial: bool) -> None:
        kept, grad_scores = _gradients(n, call, saved, begin[0], end[0], head, i, j, partial)[:2]
        grad, query = saved.grad[0, 0], saved.query[0, 0]
        sum_value[...] += matmul(kept.astype(grad.dtype), grad)
        sum_key[...] += matmul(grad_scores.astype(query.dtype), query)

    pl.when(state == PARTIAL)(functools.partial(step, True))
    pl.when(state == FULL)(functools.partial(step, False))

    @pl.when((owners[s + 2] != j) & (g == n.group - 1))
    def _end() -> None:
        grad_key[0, 0], grad_value[0, 0] = sum_key[...], sum_value[...]


def backward_queries(
    n: Grid, call: AttentionCall, walk: Walk, saved: Saved, key_transposed: Array, begin: Array, end: Array,
    *, bias_grad: bool, interpret: bool,
) -> list[Array]:  # fmt: skip
    """[dQ (B, H, D, T)], and with `bias_grad` the gradient (B, H, S, T) of the scores before the bias; float32.

    key_transposed: (B, K, D, S), the keys of `saved` again. With `bias_grad` the walk lists every tile.
    """
    dim, value_dim = saved.key.shape[-1], saved.value.shape[-1]

    def column(b: Any, s: Any, tiles: Any) -> Any:
        return step_of(tiles, b, s).tile

    def rows_spec(width: int) -> Any:
        return pl.BlockSpec((1, 1, n.rows, width), lambda b, h, s, o, t: (b, h, o[s + 1], 0))

    def columns_spec(width: int) -> Any:
        return pl.BlockSpec(
            (1, 1, n.columns, width), lambda b, h, s, o, t: (b, quotient(h, n.group), column(b, s, t), 0)
        )

    def tile_of(b: Any, h: Any, s: Any, o: Any, t: Any) -> tuple[Any, ...]:
        return b, h, column(b, s, t), o[s + 1]

    vector = pl.BlockSpec((1, 1, 1, n.rows), lambda b, h, s, o, t: (b, h, 0, o[s + 1]))
    parts = pl.BlockSpec((1, 1, 2, n.rows), lambda b, h, s, o, t: (b, h, 0, o[s + 1]))
    specs = AttentionCall(
        mask=None if call.mask is None else tile(call.mask, n.rows, n.columns, tile_of),
        bias=None if call.bias is None else tile(call.bias, n.rows, n.columns, tile_of),
        query_segment_ids=pl.BlockSpec((1, 1, n.rows), lambda b, h, s, o, t: (b, 0, o[s + 1])),
        key_segment_ids=pl.BlockSpec((1, n.columns, 1), lambda b, h, s, o, t: (b, column(b, s, t), 0)),
        seed=scalars(),
    )
    given = given_of(call, backward=True)
    interval = interval_spec(n, begin, lambda b, h, s, o, t: (b, o[s + 1]))
    out_specs = [pl.BlockSpec((1, 1, dim, n.rows), lambda b, h, s, o, t: (b, h, 0, o[s + 1]))]
    out_shape = [jax.ShapeDtypeStruct((n.batch, n.heads, dim, saved.query.shape[2]), jnp.float32)]
    if bias_grad:
        # a walk of every tile goes through them in order, so a step knows its own; empty ones are written with zeros
        out_specs.append(
            pl.BlockSpec(
                (1, 1, n.columns, n.rows), lambda b, h, s, o, t: (b, h, lax.rem(s, jnp.int32(n.column_tiles)), o[s + 1])
            )
        )
        out_shape.append(
            jax.ShapeDtypeStruct((n.batch, n.heads, saved.key.shape[2], saved.query.shape[2]), jnp.float32)
        )
    return pl.pallas_call(
        functools.partial(_queries_kernel, n, numbers_of(call), given, bias_grad),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(n.batch, n.heads, walk.steps),
            in_specs=[
                rows_spec(dim), columns_spec(dim), columns_spec(value_dim), rows_spec(value_dim), parts, vector,
                interval, interval,
                pl.BlockSpec(
                    (1, 1, dim, n.columns), lambda b, h, s, o, t: (b, quotient(h, n.group), 0, column(b, s, t))
                ),
                *(getattr(specs, name) for name in given),
            ],
            out_specs=out_specs,
            scratch_shapes=[pltpu.VMEM((dim, n.rows), jnp.float32)],
        ),
        out_shape=out_shape,
        compiler_params=CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="blocksparse_backward_queries",
    )(*walk, *saved, begin, end, key_transposed, *(getattr(call, name) for name in given))  # fmt: skip


def _queries_kernel(
    n: Grid, call: AttentionCall, given: list[str], bias_grad: bool, owners: Any, tiles: Any, *references: Any
) -> None:
    saved, (begin, end, key_transposed) = Saved(*references[:6]), references[6:9]
    call = call._replace(**dict(zip(given, references[9:], strict=False)))
    grad_query, *grad_bias, sum_query = references[9 + len(given) :]
    batch, head, s = (pl.program_id(axis) for axis in range(3))
    i, (j, state) = owners[s + 1], step_of(tiles, batch, s)

    @pl.when(owners[s] != i)
    def _start() -> None:
        sum_query[...] = jnp.zeros(sum_query.shape, jnp.float32)

    def step(partial: bool) -> None:
        _, grad_scores, grad_biased = _gradients(
            n, call, saved, begin[0], end[0], batch * n.heads + head, i, j, partial
        )
        keys = key_transposed[0, 0]
        sum_query[...] += matmul(keys, grad_scores.astype(keys.dtype))
        if bias_grad:
            grad_bias[0][0, 0] = grad_biased

    pl.when(state == PARTIAL)(functools.partial(step, True))
    pl.when(state == FULL)(functools.partial(step, False))

    if bias_grad:

        @pl.when(state == EMPTY)
        def _skipped() -> None:
            grad_bias[0][0, 0] = jnp.zeros((n.columns, n.rows), jnp.float32)

    @pl.when(owners[s + 2] != i)
    def _end() -> None:
        grad_query[0, 0] = sum_query[...]


def _gradients(
    n: Grid, call: AttentionCall, saved: Saved, begin: Array, end: Array, head: Any, i: Any, j: Any,
    partial: bool,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """(C, R) float32: the weights that were kept, the gradient of query @ key^T, and that of the biased scores."""
    logits, capped = seen_scores(n, call, saved.query[0, 0], saved.key[0, 0], begin, end, i, j, partial)
    weights = jnp.exp(logits - saved.logsumexp[0, 0, :1] - saved.logsumexp[0, 0, 1:])
    grad_weights = matmul(saved.value[0, 0], saved.grad[0, 0], transposed=True)
    kept = weights
    if call.seed is not None:
        factor = keep_factor(n, call, head, i, j)
        kept, grad_weights = weights * factor, grad_weights * factor
    grad_biased = weights * (grad_weights - saved.delta[0, 0])
    grad_scores = grad_biased
    if call.softcap is not None:
        ratio = capped / call.softcap
        grad_scores = grad_biased * (1.0 - ratio * ratio)
    return kept, grad_scores * call.scale, grad_biased
