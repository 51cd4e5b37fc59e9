"""Block-sparse attention on the CPU, step by step (aten_plan.py): memory linear in T, forward and backward.

Each step is a call of ATen's fused kernel on the keys that some of its rows see, or the same in plain torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.attention.dropout import threshold
from easytorch.kernels.attention.layout import readable
from easytorch.kernels.attention.logsumexp import parts, sink_share
from easytorch.kernels.attention.native import working_dtype
from easytorch.kernels.blocksparse import aten_tile, torch_tile
from easytorch.kernels.blocksparse.aten_plan import Step, part_of, steps
from easytorch.kernels.blocksparse.structure import Structure, within_segments
from easytorch.kernels.random.counter import counter_hash

SCORES = 2**20  # that torch_tile.py computes at once: 4 MiB, which fit into the caches of two cores


def forward(
    query: Tensor, key: Tensor, value: Tensor, begin: Tensor, end: Tensor, call: AttentionCall
) -> tuple[Tensor, Tensor]:
    """begin, end: structure.py, int32 (B or 1, T). mask and bias of the call: four dimensions.

    (B, T, H, D), (B, S, K, D), (B, S, K, Dv) -> output (B, T, H, Dv), logsumexp (B, H, 2, T): attention/logsumexp.py.
    """
    batch, length, heads, _ = query.shape
    output = query.new_zeros(batch, length, heads, value.shape[3])
    # until a step fills it in, a row has seen its sink or nothing
    highest = query.new_full((heads,), -torch.inf, dtype=working_dtype(query))
    if call.sinks is not None:
        highest = call.sinks.to(highest.dtype)
    highest = highest[:, None].expand(batch, heads, length)
    logsumexp = parts(highest, (highest > -torch.inf).to(highest.dtype))
    query, key, value, into = (readable(x).transpose(1, 2) for x in (query, key, value, output))
    tile = _tile(query, value, call)
    for part in _parts(query, key, value, begin, end, call, tile):
        into[part.queries], logsumexp[part.logsumexp] = tile.forward(
            query[part.queries], _take(key, part), _take(value, part), part.seen, part.bias,
            part.call, part.keep,
        )  # fmt: skip
    return output, logsumexp


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    begin: Tensor,
    end: Tensor,
    call: AttentionCall,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of query, key, value, of the bias with `bias_grad` and of the sinks where there are any."""
    working = working_dtype(query)
    query_grad = torch.zeros(query.shape, dtype=query.dtype)
    key_grad, value_grad = (torch.zeros(x.shape, dtype=working) for x in (key, value))
    bias = call.bias
    sinks_grad = row_bias_grad = added_grad = None
    of_rows = bias is not None and bias_grad and bias.shape[3] == 1
    if call.sinks is not None or of_rows:
        delta = (grad.to(working) * output).sum(-1).transpose(1, 2)
        share = sink_share(call.sinks, logsumexp, delta)
        if call.sinks is not None:
            sinks_grad = -share.sum((0, 2)).to(call.sinks.dtype)
        if bias is not None and of_rows:
            row_bias_grad = share[..., None].sum_to_size(bias.shape)
    if bias is not None and bias_grad and not of_rows:
        added_grad = torch.zeros(bias.shape, dtype=working)
    grad, query, key, value, output = (readable(x).transpose(1, 2) for x in (grad, query, key, value, output))
    into = query_grad.transpose(1, 2)
    keys_into, values_into = key_grad.transpose(1, 2), value_grad.transpose(1, 2)
    tile = torch_tile if added_grad is not None else _tile(query, value, call)
    for part in _parts(query, key, value, begin, end, call, tile):
        asked = {} if added_grad is None else {"bias_grad": True}
        into[part.queries], of_key, of_value, of_bias = tile.backward(
            grad[part.queries], query[part.queries], _take(key, part), _take(value, part), part.seen, part.bias,
            output[part.queries], logsumexp[part.logsumexp], part.call, part.keep, **asked,
        )  # fmt: skip
        _add(keys_into[part.keys], part.columns, of_key)
        _add(values_into[part.keys], part.columns, of_value)
        if added_grad is not None and of_bias is not None:
            whole = part_of(added_grad, part.queries[0], part.queries[2], slice(None))
            whole = whole if whole.shape[1] == 1 else whole[:, part.queries[1]]
            _add(whole.transpose(2, 3), part.columns, of_bias.sum_to_size(*whole.shape[:3], of_bias.shape[3]).mT)
    return (
        query_grad, key_grad.to(key.dtype), value_grad.to(value.dtype),
        row_bias_grad if added_grad is None else added_grad, sinks_grad,
    )  # fmt: skip


class _Part(NamedTuple):
    """One call of a tile: its positions in (B, H, T, N) and (B, K, S, N), and its matrices."""

    queries: tuple[slice, slice, slice]
    keys: tuple[slice, slice]
    columns: slice | Tensor
    seen: Tensor | None
    bias: Tensor | None
    call: AttentionCall  # its numbers, and the sinks of these heads
    keep: Tensor | None

    @property
    def logsumexp(self) -> tuple[slice, slice, slice, slice]:
        """The positions in (B, H, 2, T)."""
        batch, heads, rows = self.queries
        return batch, heads, slice(None), rows


def _tile(query: Tensor, value: Tensor, call: AttentionCall) -> ModuleType:
    """The module that computes this call's steps."""
    plain = call.softcap is None and call.seed is None and query.shape[-1] == value.shape[-1]
    return aten_tile if plain else torch_tile


def _parts(
    query: Tensor, key: Tensor, value: Tensor, begin: Tensor, end: Tensor, call: AttentionCall, tile: ModuleType
) -> Iterator[_Part]:
    """The steps of a call, split by heads where a tile computes all scores of a step at once. query: (B, H, T, D)."""
    batch, heads = query.shape[:2]
    kv_heads = key.shape[1]
    structure = Structure(begin, end, None, None)
    query_ids, key_ids = call.query_segment_ids, call.key_segment_ids
    if query_ids is not None and key_ids is not None:
        structure, exact = within_segments(structure, query_ids, key_ids)
        if exact:
            query_ids = key_ids = None
    bias = call.bias
    for step in steps(structure, batch, call.mask, query_ids, key_ids):
        group = heads // kv_heads
        count = kv_heads
        if tile is torch_tile:
            scores = (step.batch.stop - step.batch.start) * group * step.scores
            count = max(1, min(kv_heads, SCORES // scores))
        for first in range(0, kv_heads, count):
            kv = slice(first, min(first + count, kv_heads))
            own = slice(kv.start * group, kv.stop * group)
            keep = None
            if call.seed is not None:
                keep = _keep(call.seed, call.dropout_prob, step, own, heads)
            yield _Part(
                (step.batch, own, step.rows), (step.batch, kv), step.columns, _of_heads(step.seen, own),
                None if bias is None else _of_heads(part_of(bias, step.batch, step.rows, step.columns), own),
                call if call.sinks is None else call._replace(sinks=call.sinks[own]), keep,
            )  # fmt: skip


def _take(tensor: Tensor, part: _Part) -> Tensor:
    """(B, K, S, N) -> (b, k, C, N)."""
    return tensor[part.keys][:, :, part.columns]


def _add(into: Tensor, columns: slice | Tensor, added: Tensor) -> None:
    if isinstance(columns, slice):
        into[:, :, columns] += added
    else:
        into.index_add_(2, columns, added.to(into.dtype))


def _of_heads(matrix: Tensor | None, heads: slice) -> Tensor | None:
    return matrix if matrix is None or matrix.dim() < 4 or matrix.shape[1] == 1 else matrix[:, heads]


def _keep(seed: Tensor, dropout_prob: float, step: Step, own: slice, heads: int) -> Tensor:
    """The dropout mask of kernels/attention/dropout.py for one part."""
    b = torch.arange(step.batch.start, step.batch.stop)[:, None, None, None]
    h = torch.arange(own.start, own.stop)[:, None, None]
    row = torch.arange(step.rows.start, step.rows.stop)[:, None]
    columns = step.columns
    column = torch.arange(columns.start, columns.stop) if isinstance(columns, slice) else columns
    return counter_hash(seed.long(), b * heads + h, row, column) >= threshold(dropout_prob)
