"""Attention over a sharded sequence: keys and values are passed around a ring, and each rank merges in those that it
attends to.

Ring attention, https://arxiv.org/abs/2310.01889, with the online softmax of https://arxiv.org/abs/2205.14135 between
tiles. Communication overlaps with computation: the next keys are in transit while the current ones are used, and in
backward the gradients of keys and values follow one step behind. No tile materializes more than a block of rows of
scores, and what no rank sees is neither computed nor, at the end of the ring, sent. The result does not depend on
timing.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.attention.logsumexp import parts, sink_share
from easytorch.kernels.attention.native import working_dtype
from easytorch.kernels.ring.blocks import Block
from easytorch.kernels.ring.exchange import Ring
from easytorch.kernels.ring.plan import Tile, steps_of, tiles_of


class Shard(NamedTuple):
    """One rank's part: query (B, T, H, D), key (B, S, K, D), value (B, S, K, Dv) of n * T queries and n * S keys.

    call: mask and bias have four dimensions that broadcast to (B, H, T, n * S), the columns in order of position; the
    segment ids are the rank's, and the band is that of the whole sequence.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    call: AttentionCall
    layout: str

    def tiles(self, ring: Ring, owner: int) -> tuple[Tile, ...]:
        join = not self.call.dense and self.call.dropout_prob == 0.0
        return tiles_of(ring.rank, owner, ring.size, *self._lengths(), self.call.left, self.call.right, join)

    def steps(self, ring: Ring) -> int:
        return steps_of(ring.size, *self._lengths(), self.call.left, self.call.right)

    def _lengths(self) -> tuple[str, int, int]:
        return self.layout, self.query.shape[1], self.key.shape[1]


def forward(ring: Ring, shard: Shard, kernel: ModuleType) -> tuple[Tensor, Tensor]:
    """output (B, T, H, Dv) in the query's dtype, zeros for a row that sees nothing; logsumexp (B, H, 2, T)."""
    batch, length, heads, _ = shard.query.shape
    working = working_dtype(shard.query)
    output = shard.query.new_zeros((batch, length, heads, shard.value.shape[3]), dtype=working)
    # a sink is a logit of every row, without a value
    sinks = shard.call.sinks
    seen = shard.query.new_full((heads,), float("-inf"), dtype=working) if sinks is None else sinks.to(working)
    maximum = seen[:, None].expand(batch, heads, length).clone()
    total = (maximum > float("-inf")).to(working)
    held, steps = _held(shard), shard.steps(ring)
    for step in range(steps):
        following = ring.send(held) if step + 1 < steps else None
        for tile in shard.tiles(ring, (ring.rank - step) % ring.size):
            _fold(output, maximum, total, tile, *kernel.forward(_block(shard, tile, held)))
        if following is not None:
            held = following()
    return output.to(shard.query.dtype), parts(maximum, total)


def backward(
    ring: Ring, shard: Shard, output: Tensor, logsumexp: Tensor, grad: Tensor, kernel: ModuleType, *, bias_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of query, key, value, bias and sinks; the last two are this rank's part of the sum over ranks."""
    working = working_dtype(shard.query)
    query_grad = torch.zeros_like(shard.query, dtype=working)
    bias = shard.call.bias if bias_grad else None
    of_rows = bias is not None and bias.shape[3] == 1
    bias_sum = None if bias is None or of_rows else torch.zeros_like(bias, dtype=working)
    held, steps = _held(shard), shard.steps(ring)
    sums, before = [], None
    for step in range(steps):
        following = ring.send(held) if step + 1 < steps else None
        sums = [torch.zeros_like(tensor, dtype=working) for tensor in held[:2]]
        for tile in shard.tiles(ring, (ring.rank - step) % ring.size):
            rows, columns = slice(*tile.rows), slice(*tile.columns)
            bias_part = None if bias_sum is None else _part(bias_sum, tile)
            gradients = kernel.backward(
                _block(shard, tile, held), output[:, rows], logsumexp[..., rows], grad[:, rows], bias_part
            )
            query_grad[:, rows] += gradients[0]
            for total, gradient in zip(sums, gradients[1:], strict=True):
                total[:, columns] += gradient
        if before is not None:  # the gradients of the same keys from earlier ranks
            for total, earlier in zip(sums, before(), strict=True):
                total += earlier
        if following is not None:
            before = ring.send(sums)
            held = following()
    key_grad, value_grad = ring.send(sums, 1 - steps)()
    sinks_grad = None
    if shard.call.sinks is not None or of_rows:
        delta = (output.to(working) * grad.to(working)).sum(-1).transpose(1, 2)
        share = sink_share(shard.call.sinks, logsumexp, delta)
        if shard.call.sinks is not None:
            sinks_grad = -share.sum(dim=(0, 2)).to(shard.call.sinks.dtype)
        if bias is not None and of_rows:
            bias_sum = share[..., None].sum_to_size(bias.shape)
    dtype = shard.query.dtype
    if bias is not None and bias_sum is not None:
        bias_sum = bias_sum.to(bias.dtype)
    return query_grad.to(dtype), key_grad.to(dtype), value_grad.to(dtype), bias_sum, sinks_grad


def _held(shard: Shard) -> list[Tensor]:
    """The tensors that a rank sends on: key, value and, with segments, the keys' ids."""
    ids = shard.call.key_segment_ids
    return [shard.key, shard.value] if ids is None else [shard.key, shard.value, ids]


def _fold(
    output: Tensor, maximum: Tensor, total: Tensor, tile: Tile, tile_output: Tensor, tile_logsumexp: Tensor
) -> None:
    """Take a tile into the rows' running output, maximum, and sum of exponentials above it."""
    rows = slice(*tile.rows)
    tile_maximum, log_sum = tile_logsumexp.unbind(2)
    empty = log_sum == float("inf")
    tile_maximum = torch.where(empty, float("-inf"), tile_maximum)
    tile_total = torch.where(empty, 0.0, torch.exp(log_sum))
    new = torch.maximum(maximum[:, :, rows], tile_maximum)
    origin = torch.where(new == float("-inf"), 0.0, new)  # exp(-inf - 0) is 0, exp(-inf + inf) is not
    kept = total[:, :, rows] * torch.exp(maximum[:, :, rows] - origin)
    taken = tile_total * torch.exp(tile_maximum - origin)
    both = kept + taken
    divisor = torch.where(both == 0.0, 1.0, both)
    kept, taken = (x.div_(divisor).transpose(1, 2)[..., None] for x in (kept, taken))
    output[:, rows].mul_(kept).add_(tile_output * taken)
    maximum[:, :, rows], total[:, :, rows] = new, both


def _block(shard: Shard, tile: Tile, held: list[Tensor]) -> Block:
    rows, columns = slice(*tile.rows), slice(*tile.columns)
    key, value, *ids = held
    query, call = shard.query[:, rows], shard.call
    query_ids = call.query_segment_ids
    aligned = (tile.columns[1] - tile.columns[0]) - query.shape[1]
    part = call._replace(
        mask=None if call.mask is None else _part(call.mask, tile),
        bias=None if call.bias is None else _part(call.bias, tile),
        query_segment_ids=None if query_ids is None else query_ids[:, rows],
        key_segment_ids=ids[0][:, columns] if ids else None,
        sinks=None,  # the ring's own
        left=None if tile.lower is None else aligned - tile.lower,
        right=None if tile.upper is None else tile.upper - aligned,
    )
    return Block(query, key[:, columns], value[:, columns], part, tile.first_row, tile.first_column)


def _part(matrix: Tensor, tile: Tile) -> Tensor:
    """The view of a tile in (1 or B, 1 or H, 1 or T, 1 or n * S), whose columns stand in order of position."""
    if matrix.shape[2] != 1:
        matrix = matrix[:, :, slice(*tile.rows)]
    if matrix.shape[3] != 1:
        width = tile.columns[1] - tile.columns[0]
        matrix = matrix[..., tile.first_column : tile.first_column + width]
    return matrix
