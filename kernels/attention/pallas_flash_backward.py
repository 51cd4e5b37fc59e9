"""The backward kernels of Pallas flash attention: dK and dV by column tiles, then dQ and the bias by row tiles."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

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
    row_range,
    scalars,
    scores,
    tile,
    within,
)


class Saved(NamedTuple):
    """Heads first and padded: query (B, H, T, D), key (B, K, S, D), value (B, K, S, Dv), grad (B, H, T, Dv), and
    logsumexp (B, H, 2, T) and delta (B, H, 1, T).

    A padded query sees nothing: the logsumexp, in the parts of logsumexp.py, makes its weights zero. delta is the sum
    over the keys of weight times gradient of weight.
    """

    query: Any
    key: Any
    value: Any
    grad: Any
    logsumexp: Any
    delta: Any


def backward_keys(n: Grid, call: AttentionCall, saved: Saved, *, interpret: bool) -> tuple[Array, Array]:
    """dK (B, K, S, D) and dV (B, K, S, Dv), in float32, summed over the query heads that read a key head."""
    dim, value_dim = saved.key.shape[-1], saved.value.shape[-1]

    def row(j: Any, i: Any) -> Any:
        return within(i, row_range(n, call, j), n.row_tiles)

    def rows_spec(width: int) -> Any:
        return pl.BlockSpec((1, 1, n.rows, width), lambda b, k, j, g, i: (b, k * n.group + g, row(j, i), 0))

    def columns_spec(width: int) -> Any:
        return pl.BlockSpec((1, 1, n.columns, width), lambda b, k, j, g, i: (b, k, j, 0))

    vector = pl.BlockSpec((1, 1, 1, n.rows), lambda b, k, j, g, i: (b, k * n.group + g, 0, row(j, i)))
    parts = pl.BlockSpec((1, 1, 2, n.rows), lambda b, k, j, g, i: (b, k * n.group + g, 0, row(j, i)))

    def tile_of(b: Any, k: Any, j: Any, g: Any, i: Any) -> tuple[Any, ...]:
        return b, k * n.group + g, j, row(j, i)

    specs = AttentionCall(
        mask=None if call.mask is None else tile(call.mask, n.rows, n.columns, tile_of),
        bias=None if call.bias is None else tile(call.bias, n.rows, n.columns, tile_of),
        query_segment_ids=pl.BlockSpec((1, 1, n.rows), lambda b, k, j, g, i: (b, 0, row(j, i))),
        key_segment_ids=pl.BlockSpec((1, n.columns, 1), lambda b, k, j, g, i: (b, j, 0)),
        seed=scalars(),
    )
    given = given_of(call, backward=True)
    padded = saved.key.shape[2]
    return pl.pallas_call(
        functools.partial(_keys_kernel, n, numbers_of(call), given),
        grid=(n.batch, n.kv_heads, n.column_tiles, n.group, n.row_tiles),
        in_specs=[
            rows_spec(dim), columns_spec(dim), columns_spec(value_dim), rows_spec(value_dim), parts, vector,
            *(getattr(specs, name) for name in given),
        ],
        out_specs=[columns_spec(dim), columns_spec(value_dim)],
        out_shape=[
            jax.ShapeDtypeStruct((n.batch, n.kv_heads, padded, width), jnp.float32) for width in (dim, value_dim)
        ],
        scratch_shapes=[pltpu.VMEM((n.columns, width), jnp.float32) for width in (dim, value_dim)],
        compiler_params=CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary", "arbitrary")
        ),
        interpret=interpret,
        name="flash_backward_keys",
    )(*saved, *(getattr(call, name) for name in given))  # fmt: skip


def _keys_kernel(n: Grid, call: AttentionCall, given: list[str], *references: Any) -> None:
    saved = Saved(*references[:6])
    call = call._replace(**dict(zip(given, references[6:], strict=False)))
    grad_key, grad_value, sum_key, sum_value = references[6 + len(given) :]
    batch, kv_head, j, g, i = (pl.program_id(axis) for axis in range(5))
    head = batch * n.heads + kv_head * n.group + g
    first, last = row_range(n, call, j)

    @pl.when((g == 0) & (i == 0))
    def _start() -> None:
        sum_key[...] = jnp.zeros(sum_key.shape, jnp.float32)
        sum_value[...] = jnp.zeros(sum_value.shape, jnp.float32)

    def step(cut: bool) -> None:
        kept, grad_scores = _gradients(n, call, saved, head, i, j, cut)[:2]
        grad, query = saved.grad[0, 0], saved.query[0, 0]
        sum_value[...] += matmul(kept.astype(grad.dtype), grad)
        sum_key[...] += matmul(grad_scores.astype(query.dtype), query)

    visited = (i >= first) & (i < last)
    cut = is_cut(n, call, i, j)
    pl.when(visited & cut)(functools.partial(step, True))
    pl.when(visited & ~cut)(functools.partial(step, False))

    @pl.when((g == n.group - 1) & (i == n.row_tiles - 1))
    def _end() -> None:
        grad_key[0, 0], grad_value[0, 0] = sum_key[...], sum_value[...]


def backward_queries(
    n: Grid, call: AttentionCall, saved: Saved, key_transposed: Array, *, bias_grad: bool,
    interpret: bool,
) -> list[Array]:  # fmt: skip
    """[dQ (B, H, D, T)], and with `bias_grad` the gradient (B, H, S, T) of the scores before the bias; float32.

    key_transposed: (B, K, D, S), the keys of `saved` again, so that no matrix is transposed in the kernel.
    """
    dim, value_dim = saved.key.shape[-1], saved.value.shape[-1]

    def column(i: Any, j: Any) -> Any:
        return within(j, column_range(n, call, i), n.column_tiles)

    def rows_spec(width: int) -> Any:
        return pl.BlockSpec((1, 1, n.rows, width), lambda b, h, i, j: (b, h, i, 0))

    def columns_spec(width: int) -> Any:
        return pl.BlockSpec((1, 1, n.columns, width), lambda b, h, i, j: (b, quotient(h, n.group), column(i, j), 0))

    vector = pl.BlockSpec((1, 1, 1, n.rows), lambda b, h, i, j: (b, h, 0, i))
    parts = pl.BlockSpec((1, 1, 2, n.rows), lambda b, h, i, j: (b, h, 0, i))

    def tile_of(b: Any, h: Any, i: Any, j: Any) -> tuple[Any, ...]:
        return b, h, column(i, j), i

    specs = AttentionCall(
        mask=None if call.mask is None else tile(call.mask, n.rows, n.columns, tile_of),
        bias=None if call.bias is None else tile(call.bias, n.rows, n.columns, tile_of),
        query_segment_ids=pl.BlockSpec((1, 1, n.rows), lambda b, h, i, j: (b, 0, i)),
        key_segment_ids=pl.BlockSpec((1, n.columns, 1), lambda b, h, i, j: (b, column(i, j), 0)),
        seed=scalars(),
    )
    given = given_of(call, backward=True)
    padded_rows, padded_columns = saved.query.shape[2], saved.key.shape[2]
    out_specs = [pl.BlockSpec((1, 1, dim, n.rows), lambda b, h, i, j: (b, h, 0, i))]
    out_shape = [jax.ShapeDtypeStruct((n.batch, n.heads, dim, padded_rows), jnp.float32)]
    if bias_grad:
        # every tile is written, the skipped ones with zeros
        out_specs.append(pl.BlockSpec((1, 1, n.columns, n.rows), lambda b, h, i, j: (b, h, j, i)))
        out_shape.append(jax.ShapeDtypeStruct((n.batch, n.heads, padded_columns, padded_rows), jnp.float32))
    return pl.pallas_call(
        functools.partial(_queries_kernel, n, numbers_of(call), given, bias_grad),
        grid=(n.batch, n.heads, n.row_tiles, n.column_tiles),
        in_specs=[
            rows_spec(dim), columns_spec(dim), columns_spec(value_dim), rows_spec(value_dim), parts, vector,
            pl.BlockSpec((1, 1, dim, n.columns), lambda b, h, i, j: (b, quotient(h, n.group), 0, column(i, j))),
            *(getattr(specs, name) for name in given),
        ],
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=[pltpu.VMEM((dim, n.rows), jnp.float32)],
        compiler_params=CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="flash_backward_queries",
    )(*saved, key_transposed, *(getattr(call, name) for name in given))  # fmt: skip


def _queries_kernel(n: Grid, call: AttentionCall, given: list[str], bias_grad: bool, *references: Any) -> None:
    saved, key_transposed = Saved(*references[:6]), references[6]
    call = call._replace(**dict(zip(given, references[7:], strict=False)))
    grad_query, *grad_bias, sum_query = references[7 + len(given) :]
    batch, head, i, j = (pl.program_id(axis) for axis in range(4))
    first, last = column_range(n, call, i)

    @pl.when(j == 0)
    def _start() -> None:
        sum_query[...] = jnp.zeros(sum_query.shape, jnp.float32)

    def step(cut: bool) -> None:
        _, grad_scores, grad_biased = _gradients(n, call, saved, batch * n.heads + head, i, j, cut)
        keys = key_transposed[0, 0]
        sum_query[...] += matmul(keys, grad_scores.astype(keys.dtype))
        if bias_grad:
            grad_bias[0][0, 0] = grad_biased

    visited = (j >= first) & (j < last)
    cut = is_cut(n, call, i, j)
    pl.when(visited & cut)(functools.partial(step, True))
    pl.when(visited & ~cut)(functools.partial(step, False))

    if bias_grad:

        @pl.when(~visited)
        def _skipped() -> None:
            grad_bias[0][0, 0] = jnp.zeros((n.columns, n.rows), jnp.float32)

    @pl.when(j == n.column_tiles - 1)
    def _end() -> None:
        grad_query[0, 0] = sum_query[...]


def _gradients(
    n: Grid, call: AttentionCall, saved: Saved, head: Any, i: Any, j: Any, cut: bool
) -> tuple[Array, Array, Array]:
    """(C, R) float32: the weights that were kept, the gradient of query @ key^T, and that of the biased scores."""
    logits, capped = scores(n, call, saved.query[0, 0], saved.key[0, 0], i, j, cut)
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
