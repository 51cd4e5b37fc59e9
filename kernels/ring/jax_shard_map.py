"""The ring in jax: `shard_map` over one axis of a mesh, keys and values passed on by `ppermute`, in one program.

Whole arrays in and out, sharded along the sequence; in the "zigzag" layout they are the ranks' shards concatenated. A
rank's tiles are those of plan.py: ranks differ by the branch of a `lax.switch`, so a fully masked tile costs nothing.
Tiles are computed by attention/pallas_or_jax.py. See native.py for the algorithm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from easytorch.kernels.attention.call import map_tensors
from easytorch.kernels.attention.jax_call import AttentionCall
from easytorch.kernels.attention.jax_flash import logsumexp_parts, sink_weights
from easytorch.kernels.attention.pallas_or_jax import flash_backward, flash_forward
from easytorch.kernels.ring.plan import Tile, steps_of, tiles_of

State = tuple[Array, Array, Array]  # the rows' running output, maximum, and sum of exponentials above it


class Ring(NamedTuple):
    """mesh: a jax `Mesh` or `AbstractMesh`. axis: the one that shards the sequence.

    batch_axes, head_axes: those that shard batch and heads.
    """

    mesh: Any
    axis: str
    layout: str = "contiguous"
    batch_axes: tuple[str, ...] = ()
    head_axes: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return self.mesh.shape[self.axis]

    def shifted(self, arrays: Any, hops: int = 1) -> Any:
        return lax.ppermute(arrays, self.axis, [(r, (r + hops) % self.size) for r in range(self.size)])


def ring_forward(
    query: Array,
    key: Array,
    value: Array,
    call: AttentionCall,
    *,
    ring: Ring,
) -> tuple[Array, Array]:
    """(B, T, H, D), (B, S, K, D), (B, S, K, Dv) -> output (B, T, H, Dv), logsumexp float32 (B, H, 2, T)."""

    def local(query: Array, key: Array, value: Array, call: AttentionCall) -> tuple[Array, Array]:
        sinks = call.sinks
        batch, length, heads, _ = query.shape
        seen = jnp.full((heads,), -jnp.inf) if sinks is None else sinks.astype(jnp.float32)
        output = jnp.zeros((batch, length, heads, value.shape[3]), jnp.float32)
        m_i = jnp.broadcast_to(seen[:, None], (batch, heads, length))
        state = output, m_i, jnp.where(m_i == -jnp.inf, 0.0, 1.0)
        held = key, value, call.key_segment_ids

        def branch(tiles: tuple[Tile, ...]) -> Callable[..., State]:
            def run(state: State, held: tuple[Array, Array, Array | None]) -> State:
                for tile in tiles:
                    part = _tile(tile, query, held, call)
                    state = _folded(state, tile, *flash_forward(*part))
                return state

            return run

        steps = _steps(ring, query, key, call)
        for step in range(steps):
            following = ring.shifted(held) if step + 1 < steps else held
            state = _switch(ring, step, query, key, call, branch, state, held)
            held = following
        output, m_i, l_i = state
        return output.astype(query.dtype), logsumexp_parts(m_i, l_i, axis=2)

    given = (query, key, value, call)
    return _mapped(ring, local, given, ("btn", "lse"))(*given)


def ring_backward(
    query: Array,
    key: Array,
    value: Array,
    call: AttentionCall,
    output: Array,
    logsumexp: Array,
    grad: Array,
    *,
    ring: Ring,
) -> tuple[Array, Array, Array, None, Array | None]:
    """Gradients of query, key, value, bias (None: it takes none) and sinks."""

    def local(
        query: Array, key: Array, value: Array, call: AttentionCall, output: Array, logsumexp: Array, grad: Array
    ) -> tuple[Array, Array, Array, Array | None]:
        sinks = call.sinks
        held = key, value, call.key_segment_ids
        query_grad = jnp.zeros(query.shape, jnp.float32)
        sums = jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32)

        def branch(tiles: tuple[Tile, ...]) -> Callable[..., tuple[Array, tuple[Array, Array]]]:
            def run(
                state: tuple[Array, tuple[Array, Array]], held: tuple[Array, Array, Array | None]
            ) -> tuple[Array, tuple[Array, Array]]:
                query_grad, (key_grad, value_grad) = state
                for tile in tiles:
                    rows, columns = slice(*tile.rows), slice(*tile.columns)
                    part = _tile(tile, query, held, call)
                    given = output[:, rows], logsumexp[..., rows], grad[:, rows]
                    dq, dk, dv, *_ = flash_backward(*part, *given)
                    query_grad = query_grad.at[:, rows].add(dq)
                    key_grad = key_grad.at[:, columns].add(dk)
                    value_grad = value_grad.at[:, columns].add(dv)
                return query_grad, (key_grad, value_grad)

            return run

        steps = _steps(ring, query, key, call)
        for step in range(steps):
            following = ring.shifted(held) if step + 1 < steps else held
            if step:  # the sums over these keys so far
                sums = ring.shifted(sums)
            query_grad, sums = _switch(ring, step, query, key, call, branch, (query_grad, sums), held)
            held = following
        key_grad, value_grad = ring.shifted(sums, 1 - steps) if steps > 1 else sums
        sinks_grad = None
        if sinks is not None:
            delta = jnp.einsum("bthd,bthd->bht", output.astype(jnp.float32), grad.astype(jnp.float32))
            weight = sink_weights(sinks, logsumexp)
            axes = (ring.axis, *ring.batch_axes)
            sinks_grad = -lax.psum((weight * delta).sum(axis=(0, 2)), axes).astype(sinks.dtype)
        return query_grad.astype(query.dtype), key_grad.astype(key.dtype), value_grad.astype(value.dtype), sinks_grad

    given = (query, key, value, call, output, logsumexp, grad)
    outputs = ("btn", "btn", "btn", None if call.sinks is None else "sinks")
    dq, dk, dv, dsinks = _mapped(ring, local, given, outputs)(*given)
    return dq, dk, dv, None, dsinks


def _mapped(ring: Ring, local: Callable[..., Any], given: tuple[Any, ...], outputs: tuple[str | None, ...]) -> Any:
    """`local` over the mesh; given: query, key, value, call and, in backward, output, logsumexp, grad."""
    batch, heads = ring.batch_axes or None, ring.head_axes or None
    specs = {
        "btn": PartitionSpec(batch, ring.axis, heads, None),
        "ids": PartitionSpec(batch, ring.axis),
        "sinks": PartitionSpec(heads),
        "lse": PartitionSpec(batch, heads, None, ring.axis),
        None: None,
    }
    kinds = {"query_segment_ids": "ids", "key_segment_ids": "ids", "sinks": "sinks"}
    call = map_tensors(given[3], lambda name, _: specs[kinds[name]])
    results = (specs[kind] for kind in ("btn", "lse", "btn")[: len(given) - 4])
    inputs = (*(specs["btn"],) * 3, call, *results)
    return jax.shard_map(
        local, mesh=ring.mesh, in_specs=inputs, out_specs=tuple(specs[kind] for kind in outputs), check_vma=False
    )


def _switch(
    ring: Ring, step: int, query: Array, key: Array, call: AttentionCall, branch: Callable[..., Any], *operands: Any
) -> Any:
    """The tiles of this rank at this step: one branch for each different plan of the ranks."""
    lengths = query.shape[1], key.shape[1]
    plans = [
        tuple(
            tile._replace(first_row=0, first_column=0)  # only dropout would need a tile's position
            for tile in tiles_of(
                rank, (rank - step) % ring.size, ring.size, ring.layout, *lengths, call.left, call.right
            )
        )
        for rank in range(ring.size)
    ]
    different = list(dict.fromkeys(plans))
    if len(different) == 1:
        return branch(different[0])(*operands)
    chosen = jnp.array([different.index(plan) for plan in plans])[lax.axis_index(ring.axis)]
    return lax.switch(chosen, [branch(plan) for plan in different], *operands)


def _steps(ring: Ring, query: Array, key: Array, call: AttentionCall) -> int:
    return steps_of(ring.size, ring.layout, query.shape[1], key.shape[1], call.left, call.right)


def _tile(
    tile: Tile, query: Array, held: tuple[Array, Array, Array | None], call: AttentionCall
) -> tuple[Array, Array, Array, AttentionCall]:
    """The arguments of `flash_forward`, which aligns the last row with the last column."""
    rows, columns = slice(*tile.rows), slice(*tile.columns)
    key, value, key_ids = held
    aligned = (tile.columns[1] - tile.columns[0]) - (tile.rows[1] - tile.rows[0])
    part = call._replace(key_segment_ids=key_ids).part(rows, columns)
    part = part._replace(
        sinks=None,  # the ring's own
        left=None if tile.lower is None else aligned - tile.lower,
        right=None if tile.upper is None else tile.upper - aligned,
    )
    return query[:, rows], key[:, columns], value[:, columns], part


def _folded(state: State, tile: Tile, output: Array, logsumexp: Array) -> State:
    """Take a tile into the rows' running output, maximum and sum."""
    rows = slice(*tile.rows)
    total, m_i, l_i = state
    log_sum = logsumexp[:, :, 1]
    m_tile = jnp.where(log_sum == jnp.inf, -jnp.inf, logsumexp[:, :, 0])
    m_new = jnp.maximum(m_i[:, :, rows], m_tile)
    origin = jnp.where(m_new == -jnp.inf, 0.0, m_new)
    kept = l_i[:, :, rows] * jnp.exp(m_i[:, :, rows] - origin)
    taken = jnp.where(log_sum == jnp.inf, 0.0, jnp.exp(log_sum)) * jnp.exp(m_tile - origin)
    both = kept + taken
    divisor = jnp.where(both == 0.0, 1.0, both)
    kept, taken = ((part / divisor).transpose(0, 2, 1)[..., None] for part in (kept, taken))
    rescaled = total[:, rows] * kept + output * taken
    return total.at[:, rows].set(rescaled), m_i.at[:, :, rows].set(m_new), l_i.at[:, :, rows].set(both)
