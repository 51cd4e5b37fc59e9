"""Attention by online softmax in jax, forward and backward: memory linear in T, and no torch. See contract.py.

A call's tensors are traced and its numbers static (jax_call.py), so that a function can be jitted, lowered into a
torch_xla graph or compiled for TPU. One key/value head at a time, the G query heads that read it folded into rows;
tiles outside the causal band or window are skipped. Follows FlashAttention-2, https://arxiv.org/abs/2307.08691.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from easytorch.kernels.attention.jax_call import AttentionCall
from easytorch.kernels.attention.jax_flash_tiles import (
    column_range,
    from_key_heads,
    from_query_heads,
    keep_factor,
    key_heads,
    matmul,
    pad,
    padded_to_tiles,
    query_heads,
    row_range,
    scores,
    tile_grid,
    tile_start,
)


def flash_forward(
    query: Array,
    key: Array,
    value: Array,
    call: AttentionCall,
) -> tuple[Array, Array]:
    """(B, T, H, D), (B, S, K, D), (B, S, K, Dv) -> output (B, T, H, Dv), logsumexp float32 (B, H, 2, T).

    The logsumexp is in the two parts of logsumexp.py.
    """
    n, sinks = tile_grid(query, key), call.sinks
    value_dim = value.shape[-1]
    if query.size == 0 or key.size == 0 or value.size == 0:
        highest = jnp.full(n.heads, -jnp.inf) if sinks is None else sinks.astype(jnp.float32)
        highest = jnp.broadcast_to(highest[:, None], (n.batch, n.heads, n.length))
        logsumexp = logsumexp_parts(highest, jnp.where(highest == -jnp.inf, 0.0, 1.0), axis=2)
        return jnp.zeros((n.batch, n.length, n.heads, value_dim), query.dtype), logsumexp
    call = padded_to_tiles(n, call)
    precision = _precision(query)
    sink = None if sinks is None else sinks.astype(jnp.float32).reshape(n.kv_heads, n.group)

    def head_step(head: Array, parts: tuple[Array, Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        queries, keys, values = parts  # (G, T, D), (S, D), (S, Dv)

        def row_tile(i: Array) -> tuple[Array, Array]:
            rows = lax.dynamic_slice_in_dim(queries, i * n.rows, n.rows, axis=1)

            def column_tile(j: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                m_i, l_i, output = state
                columns = lax.dynamic_slice_in_dim(keys, j * n.columns, n.columns)
                logits, _ = scores(n, call, rows, columns, head, i, j, precision)
                m_new = jnp.maximum(m_i, logits.max(axis=-1))
                finite = _finite(m_new)
                weights = jnp.exp(logits - finite[..., None])
                alpha = jnp.exp(m_i - finite)
                l_i = l_i * alpha + weights.sum(axis=-1)
                if call.seed is not None:
                    weights = weights * keep_factor(n, call, head, i, j)
                part = lax.dynamic_slice_in_dim(values, j * n.columns, n.columns)
                added = matmul(weights.reshape(-1, n.columns), part, (1, 0), precision)
                return m_new, l_i, output * alpha[..., None] + added.reshape(output.shape)

            m_i = jnp.full((n.group, n.rows), -jnp.inf)
            if sink is not None:
                m_i = jnp.broadcast_to(sink[head % n.kv_heads][:, None], m_i.shape)
            l_i = jnp.where(m_i == -jnp.inf, 0.0, 1.0)  # a sink is a logit already seen
            first, last = column_range(n, call, i)
            start = (m_i, l_i, jnp.zeros((n.group, n.rows, value_dim)))
            m_i, l_i, output = lax.fori_loop(first, last, column_tile, start)
            divisor = jnp.where(l_i == 0.0, 1.0, l_i)
            return output / divisor[..., None], logsumexp_parts(m_i, l_i, axis=-1)

        tiles = lax.map(row_tile, jnp.arange(n.row_tiles))  # (tiles, G, R, Dv), (tiles, G, R, 2)
        output, logsumexp = (jnp.moveaxis(x, 0, 1).reshape(n.group, -1, *x.shape[3:]) for x in tiles)
        return head + 1, (output, logsumexp)

    parts = query_heads(n, query), key_heads(n, key), key_heads(n, value)
    _, (output, logsumexp) = lax.scan(head_step, jnp.int32(0), parts)
    logsumexp = logsumexp.reshape(n.batch, n.heads, -1, 2)[:, :, : n.length].swapaxes(2, 3)
    return from_query_heads(n, output).astype(query.dtype), logsumexp


def flash_backward(
    query: Array,
    key: Array,
    value: Array,
    call: AttentionCall,
    output: Array,
    logsumexp: Array,
    grad: Array,
    *,
    bias_grad: bool = True,
) -> tuple[Array, Array, Array, Array | None, Array | None]:
    """Gradients of query, key, value, bias and sinks.

    The arguments of `flash_forward`, its two results, and the gradient (B, T, H, Dv) of the first. The gradient of bias
    is None when `bias_grad` is False.
    """
    n, bias, sinks = tile_grid(query, key), call.bias, call.sinks
    wants_bias = bias is not None and bias_grad
    if query.size == 0 or key.size == 0 or value.size == 0:
        dq, dk, dv = (jnp.zeros_like(x) for x in (query, key, value))
        dbias, dsinks = (None if x is None else jnp.zeros_like(x) for x in (bias if wants_bias else None, sinks))
        return dq, dk, dv, dbias, dsinks
    call = padded_to_tiles(n, call)
    precision = _precision(query)
    # sum over the keys of weight * gradient of weight, for each row: dropout leaves it as it is
    delta = jnp.einsum("bthd,bthd->bht", output.astype(jnp.float32), grad.astype(jnp.float32))
    grad_sinks, share = None, jnp.zeros_like(delta)
    if sinks is not None:
        share = sink_weights(sinks, logsumexp) * delta
        grad_sinks = -share.sum(axis=(0, 2)).astype(sinks.dtype)
    of_rows = bias is not None and bias.shape[-1] == 1  # logsumexp.sink_share
    by_tiles = wants_bias and not of_rows
    grad_bias = jnp.zeros(call.bias.shape if by_tiles and call.bias is not None else (1, 1, 1, 1))

    def head_step(
        carry: tuple[Array, Array], parts: tuple[Array, ...]
    ) -> tuple[tuple[Array, Array], tuple[Array, Array, Array]]:
        head, grad_bias = carry
        queries, keys, values, grads, maxima, log_sums, deltas = parts

        def column_tile(state: tuple[Array, Array], j: Array) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
            columns = lax.dynamic_slice_in_dim(keys, j * n.columns, n.columns)
            part = lax.dynamic_slice_in_dim(values, j * n.columns, n.columns)

            def row_tile(i: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
                grad_queries, grad_bias, grad_columns, grad_part = state
                rows, grad_rows, maximum, log_sum, row_delta = (
                    lax.dynamic_slice_in_dim(x, i * n.rows, n.rows, axis=1)
                    for x in (queries, grads, maxima, log_sums, deltas)
                )
                flat_rows, flat_grad = rows.reshape(-1, rows.shape[-1]), grad_rows.reshape(-1, part.shape[-1])
                logits, capped = scores(n, call, rows, columns, head, i, j, precision)
                weights = jnp.exp(logits - maximum[..., None] - log_sum[..., None])
                grad_weights = matmul(flat_grad, part, (1, 1), precision).reshape(weights.shape)
                kept = weights
                if call.seed is not None:
                    factor = keep_factor(n, call, head, i, j)
                    kept, grad_weights = weights * factor, grad_weights * factor
                grad_part = grad_part + matmul(kept.reshape(-1, n.columns), flat_grad, (0, 0), precision)
                grad_scores = weights * (grad_weights - row_delta[..., None])
                if by_tiles:
                    start, size = tile_start(n, grad_bias, head, i, j)
                    axes = tuple(axis for axis in range(3) if size[axis + 1] == 1)
                    added = grad_scores.sum(axis=axes, keepdims=True)[None]
                    grad_bias = lax.dynamic_update_slice(
                        grad_bias, lax.dynamic_slice(grad_bias, start, size) + added, start
                    )
                if call.softcap is not None:
                    grad_scores = grad_scores * (1.0 - jnp.square(capped / call.softcap))
                flat_scores = (grad_scores * call.scale).reshape(-1, n.columns)
                grad_columns = grad_columns + matmul(flat_scores, flat_rows, (0, 0), precision)
                added = matmul(flat_scores, columns, (1, 0), precision).reshape(rows.shape)
                old = lax.dynamic_slice_in_dim(grad_queries, i * n.rows, n.rows, axis=1)
                grad_queries = lax.dynamic_update_slice_in_dim(grad_queries, old + added, i * n.rows, axis=1)
                return grad_queries, grad_bias, grad_columns, grad_part

            start = (*state, jnp.zeros_like(columns), jnp.zeros_like(part))
            first, last = row_range(n, call, j)
            grad_queries, grad_bias, grad_columns, grad_part = lax.fori_loop(first, last, row_tile, start)
            return (grad_queries, grad_bias), (grad_columns, grad_part)

        start = (jnp.zeros_like(queries), grad_bias)
        (grad_queries, grad_bias), tiles = lax.scan(column_tile, start, jnp.arange(n.column_tiles))
        grad_keys, grad_values = (x.reshape(-1, x.shape[-1]) for x in tiles)
        return (head + 1, grad_bias), (grad_queries, grad_keys, grad_values)

    # a padded row sees nothing: its weights are exp(score - 0 - inf)
    rows = (
        pad(x.reshape(n.batch * n.kv_heads, n.group, -1), 2, n.rows, fill)
        for x, fill in ((logsumexp[:, :, 0], 0.0), (logsumexp[:, :, 1], jnp.inf), (delta, 0.0))
    )
    parts = (query_heads(n, query), key_heads(n, key), key_heads(n, value), query_heads(n, grad), *rows)
    (_, grad_bias), (grad_query, grad_key, grad_value) = lax.scan(head_step, (jnp.int32(0), grad_bias), parts)
    grad_bias_out = None
    if bias is not None and wants_bias and of_rows:
        grad_bias_out = summed_to(bias, share[..., None])
    elif bias is not None and wants_bias:
        padded = grad_bias[:, :, : min(grad_bias.shape[2], n.length), : min(grad_bias.shape[3], n.keys)]
        grad_bias_out = padded.reshape(bias.shape).astype(bias.dtype)
    return (
        from_query_heads(n, grad_query).astype(query.dtype),
        from_key_heads(n, grad_key).astype(key.dtype),
        from_key_heads(n, grad_value).astype(value.dtype),
        grad_bias_out,
        grad_sinks,
    )


def logsumexp_parts(m_i: Array, l_i: Array, axis: int) -> Array:
    """logsumexp.py's two parts at a new axis, from the maximum of a row and its sum of exponentials above it."""
    empty = l_i == 0.0
    log_sum = jnp.where(empty, jnp.inf, jnp.log(jnp.where(empty, 1.0, l_i)))
    return jnp.stack((jnp.where(empty, 0.0, m_i), log_sum), axis)


def sink_weights(sinks: Array, logsumexp: Array) -> Array:
    """(H,), (B, H, 2, T) -> (B, H, T): what of each row's probability its sink takes."""
    return jnp.exp(sinks.astype(jnp.float32)[:, None] - logsumexp[:, :, 0] - logsumexp[:, :, 1])


def summed_to(bias: Array, of_scores: Array) -> Array:
    """The gradient (B, H, T, S or 1) of the scores summed to the shape of the bias, in its dtype."""
    full = (1,) * (4 - bias.ndim) + bias.shape
    axes = tuple(axis for axis, size in enumerate(full) if size == 1)
    return of_scores.sum(axis=axes, keepdims=True).reshape(bias.shape).astype(bias.dtype)


def _finite(m_i: Array) -> Array:
    """The maximum of a row, 0 where the row has seen nothing yet: exp(-inf - 0) is 0, exp(-inf + inf) is not."""
    return jnp.where(m_i == -jnp.inf, 0.0, m_i)


def _precision(query: Array) -> lax.Precision:
    """float32 inputs are multiplied in float32 on TPU too, whose default would round them to bfloat16."""
    return lax.Precision.HIGHEST if query.dtype == jnp.float32 else lax.Precision.DEFAULT
