"""The grouped matmul of a TPU in Pallas, forward and gradient of the weight.

A step of the grid multiplies one tile of rows with one group's matrix; a tile that holds rows of several groups is
visited once for each, and each visit writes its own rows. Which tile and which group a step has is prefetched as
scalars (the scheme of megablox: Gale et al., https://arxiv.org/abs/2211.15841, and jax's own kernel of that name).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from easytorch.kernels.grouped_matmul.pallas_tuning import LANES, BlockSizes, forward_blocks, weight_grad_blocks


class Visits(NamedTuple):
    """int32: group and row tile of each step of the grid, how many steps there are, first row of each group and M.

    The last group, E, is that of no expert: its rows become zeros.
    """

    groups: Array
    tiles: Array
    steps: Array
    edges: Array


def visits_of(group_sizes: Array, rows: int, block: int, *, every_group: bool) -> Visits:
    """every_group: an empty group is visited once, so that its gradient is written."""
    experts = group_sizes.shape[0]
    ends = jnp.minimum(jnp.cumsum(jnp.maximum(group_sizes, 0)), rows).astype(jnp.int32)
    edges = jnp.concatenate([jnp.zeros(1, jnp.int32), ends, jnp.full(1, rows, jnp.int32)])
    first, last = edges[:-1] // block, (edges[1:] - 1) // block
    tiles = -(-rows // block)
    many = jnp.where(edges[1:] > edges[:-1], last - first + 1, 1 if every_group else 0)
    if every_group:
        many = many.at[experts].set(0)
    totals = jnp.cumsum(many)
    # a group begins in a tile that the one before it ends in: one visit more than tiles for each
    steps = jnp.arange(tiles + 2 * experts + 1, dtype=jnp.int32)
    groups = jnp.minimum(jnp.searchsorted(totals, steps, side="right"), experts).astype(jnp.int32)
    begins = jnp.concatenate([jnp.zeros(1, totals.dtype), totals[:-1]])
    tile = jnp.clip(first[groups] + steps - begins[groups], 0, tiles - 1)
    return Visits(groups, tile.astype(jnp.int32), totals[-1].astype(jnp.int32), edges)


def grouped_matmul(x: Array, weight: Array, group_sizes: Array, *, transposed: bool, interpret: bool = False) -> Array:
    """x (M, K), weight (E, K, N) (transposed: (E, N, K)), group_sizes (E,) -> (M, N)."""
    experts = weight.shape[0]
    (rows, depth), columns = x.shape, weight.shape[1 if transposed else 2]
    blocks = forward_blocks(rows, experts, columns, depth, x.dtype.itemsize * 8)
    x, weight = _padded(x, 1), _padded(weight, 2 if transposed else 1)
    visits = visits_of(group_sizes, rows, blocks.rows, every_group=False)

    def weight_at(n: Any, t: Any, k: Any, groups: Any, *_: Any) -> tuple[Any, ...]:
        expert = jnp.minimum(groups[t], experts - 1)
        return (expert, n, k) if transposed else (expert, k, n)

    shape = (blocks.columns, blocks.depth) if transposed else (blocks.depth, blocks.columns)
    return pl.pallas_call(
        functools.partial(_forward_kernel, blocks, experts, transposed),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(-(-columns // blocks.columns), visits.steps, x.shape[1] // blocks.depth),
            in_specs=[
                pl.BlockSpec((blocks.rows, blocks.depth), lambda n, t, k, groups, tiles, edges: (tiles[t], k)),
                pl.BlockSpec((None, *shape), weight_at),
            ],
            out_specs=pl.BlockSpec((blocks.rows, blocks.columns), lambda n, t, k, groups, tiles, edges: (tiles[t], n)),
            scratch_shapes=[pltpu.VMEM((blocks.rows, blocks.columns), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((rows, columns), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        interpret=interpret,
        name="grouped_matmul",
    )(visits.groups, visits.tiles, visits.edges, x, weight)


def _forward_kernel(
    blocks: BlockSizes, experts: int, transposed: bool, groups: Any, tiles: Any, edges: Any, x: Any, weight: Any,
    output: Any, total: Any,
) -> None:  # fmt: skip
    step, k = pl.program_id(1), pl.program_id(2)
    group, tile = groups[step], tiles[step]

    @pl.when(k == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    @pl.when(group < experts)
    def _() -> None:
        total[...] += _dot(x[...], weight[...], 1, 1 if transposed else 0)

    @pl.when(k == pl.num_programs(2) - 1)
    def _() -> None:
        rows = tile * blocks.rows + lax.broadcasted_iota(jnp.int32, total.shape, 0)
        own = (rows >= edges[group]) & (rows < edges[group + 1])
        fresh = (step == 0) | (tiles[jnp.maximum(step - 1, 0)] != tile)
        rest = jnp.where(fresh, 0.0, output[...].astype(jnp.float32))
        output[...] = jnp.where(own, total[...], rest).astype(output.dtype)


def grouped_weight_grad(left: Array, right: Array, group_sizes: Array, *, interpret: bool = False) -> Array:
    """left (M, A), right (M, B), group_sizes (E,) -> (E, A, B), left^T @ right of the rows of each group."""
    experts, rows = group_sizes.shape[0], left.shape[0]
    a, b = left.shape[1], right.shape[1]
    blocks = weight_grad_blocks(rows, b, a, left.dtype.itemsize * 8)
    visits = visits_of(group_sizes, rows, blocks.rows, every_group=True)
    return pl.pallas_call(
        functools.partial(_weight_grad_kernel, blocks),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(-(-a // blocks.depth), -(-b // blocks.columns), visits.steps),
            in_specs=[
                pl.BlockSpec((blocks.rows, blocks.depth), lambda i, j, t, groups, tiles, edges: (tiles[t], i)),
                pl.BlockSpec((blocks.rows, blocks.columns), lambda i, j, t, groups, tiles, edges: (tiles[t], j)),
            ],
            out_specs=pl.BlockSpec(
                (None, blocks.depth, blocks.columns), lambda i, j, t, groups, tiles, edges: (groups[t], i, j)
            ),
            scratch_shapes=[pltpu.VMEM((blocks.depth, blocks.columns), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((experts, a, b), left.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="grouped_weight_grad",
    )(visits.groups, visits.tiles, visits.edges, left, right)


def _weight_grad_kernel(
    blocks: BlockSizes, groups: Any, tiles: Any, edges: Any, left: Any, right: Any, output: Any, total: Any
) -> None:
    step = pl.program_id(2)
    group = groups[step]

    @pl.when((step == 0) | (groups[jnp.maximum(step - 1, 0)] != group))
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    # both: a row of another group, or past the end, may hold NaN in either
    at, start, end = tiles[step] * blocks.rows, edges[group], edges[group + 1]
    first, second = (_own_rows(block, at, start, end) for block in (left, right))
    total[...] += _dot(first, second, 0, 0)

    @pl.when((step == pl.num_programs(2) - 1) | (groups[jnp.minimum(step + 1, groups.shape[0] - 1)] != group))
    def _() -> None:
        output[...] = total[...].astype(output.dtype)


def _own_rows(block: Any, first: Any, start: Any, end: Any) -> Array:
    rows = first + lax.broadcasted_iota(jnp.int32, block.shape, 0)
    return jnp.where((rows >= start) & (rows < end), block[...], jnp.zeros((), block.dtype))


def _dot(left: Array, right: Array, left_axis: int, right_axis: int) -> Array:
    """The product over these two axes, in float32, of which the matrix unit would take 8 bits of a float32 number."""
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else lax.Precision.DEFAULT
    dimensions = (((left_axis,), (right_axis,)), ((), ()))
    return lax.dot_general(left, right, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _padded(operand: Array, axis: int) -> Array:
    """With zeros to whole lanes along the axis that is summed over; what lies past the others is never kept."""
    rest = -operand.shape[axis] % LANES
    if rest == 0:
        return operand
    return jnp.pad(operand, [(0, rest if a == axis else 0) for a in range(operand.ndim)])
