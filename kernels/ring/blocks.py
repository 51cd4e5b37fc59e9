"""One tile of a ring: what every block kernel is given, and the kernel that defines it, in plain torch.

A block kernel is a module with
    forward(block) -> (output (B, R, H, Dv), logsumexp (B, H, 2, R))
    backward(block, output, logsumexp, grad, bias_grad) -> (query, key, value gradients)
where output and logsumexp are those of the rows over all keys, and bias_grad, None or a float tensor of the shape of
the block's bias, is added to in place. The logsumexp is in the two parts of attention/logsumexp.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.attention.dropout import keep_mask
from easytorch.kernels.attention.logsumexp import logsumexp_of, weights_of
from easytorch.kernels.attention.native import working_dtype

BLOCK = 256  # rows at a time: memory stays linear in the length


class Block(NamedTuple):
    """query (B, R, H, D), key (B, C, K, D), value (B, C, K, Dv) and what applies to them, without sinks.

    Mask and bias of the call have four dimensions. first_row, first_column: where the block starts in the whole matrix
    of scores, which decides about dropout alone.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    call: AttentionCall
    first_row: int
    first_column: int

    @property
    def lower(self) -> int | None:
        """Row i sees column j where i + lower <= j <= i + upper; None is unbounded."""
        return None if self.call.left is None else self.shift - self.call.left

    @property
    def upper(self) -> int | None:
        return None if self.call.right is None else self.shift + self.call.right

    @property
    def shift(self) -> int:
        return self.key.shape[1] - self.query.shape[1]


def forward(block: Block) -> tuple[Tensor, Tensor]:
    """The definition of attention/contract.py for some rows over some keys."""
    outputs, parts = [], []
    for first in range(0, block.query.shape[1], BLOCK):
        part = _rows(block, first)
        scores, _ = _scores(part)
        logsumexp = logsumexp_of(scores)
        weights = weights_of(scores, logsumexp)
        outputs.append(_weigh(_kept(part, weights), part.value))
        parts.append(logsumexp)
    return torch.cat(outputs, dim=1), torch.cat(parts, dim=3)


def backward(
    block: Block, output: Tensor, logsumexp: Tensor, grad: Tensor, bias_grad: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, in the working dtype; equations as in triton_flash_backward_keys.py."""
    working = working_dtype(block.query)
    kv_heads = block.key.shape[2]
    key_grad = torch.zeros_like(block.key, dtype=working)
    value_grad = torch.zeros_like(block.value, dtype=working)
    query_grads = []
    key, value = block.key.to(working), block.value.to(working)
    for first in range(0, block.query.shape[1], BLOCK):
        part = _rows(block, first)
        rows = part.query.shape[1]
        query = _grouped(part.query.to(working), kv_heads)
        row_grad = grad[:, first : first + rows].to(working)
        delta = (row_grad * output[:, first : first + rows].to(working)).sum(-1).transpose(1, 2)
        scores, capped = _scores(part)
        weights = weights_of(scores, logsumexp[..., first : first + rows])
        grouped_grad = _grouped(row_grad, kv_heads)
        value_grad += torch.einsum("bkgrc,brkgd->bckd", _by_group(_kept(part, weights), kv_heads), grouped_grad)
        weight_grad = torch.einsum("brkgd,bckd->bkgrc", grouped_grad, value).flatten(1, 2)
        score_grad = weights * (_kept(part, weight_grad) - delta[..., None])
        if bias_grad is not None:
            _row_part(bias_grad, first).add_(score_grad.sum_to_size(_row_part(bias_grad, first).shape))
        if block.call.softcap is not None:
            score_grad = score_grad * (1.0 - (capped / block.call.softcap).square())
        by_group = _by_group(score_grad * block.call.scale, kv_heads)
        query_grads.append(torch.einsum("bkgrc,bckd->brkgd", by_group, key).reshape(part.query.shape))
        key_grad += torch.einsum("bkgrc,brkgd->bckd", by_group, query)
    return torch.cat(query_grads, dim=1), key_grad, value_grad


def _rows(block: Block, first: int) -> Block:
    rows = slice(first, first + BLOCK)
    query, call = block.query[:, rows], block.call.part(rows, slice(None))
    # fewer rows: the last of them is aligned with another column
    moved = query.shape[1] + first - block.query.shape[1]
    call = call._replace(
        left=None if call.left is None else call.left - moved, right=None if call.right is None else call.right + moved
    )
    return block._replace(query=query, call=call, first_row=block.first_row + first)


def _row_part(tensor: Tensor, first: int) -> Tensor:
    """A block of rows of (1 or B, 1 or H, 1 or R, 1 or C)."""
    return tensor if tensor.shape[2] == 1 else tensor[:, :, first : first + BLOCK]


def _scores(block: Block) -> tuple[Tensor, Tensor]:
    """Scores (B, H, R, C), -inf where unseen, and the same before bias and masks."""
    working = working_dtype(block.query)
    rows, columns, kv_heads = block.query.shape[1], block.key.shape[1], block.key.shape[2]
    query = _grouped(block.query.to(working) * block.call.scale, kv_heads)
    capped = torch.einsum("brkgd,bckd->bkgrc", query, block.key.to(working)).flatten(1, 2)
    softcap, bias = block.call.softcap, block.call.bias
    if softcap is not None:
        capped = softcap * torch.tanh(capped / softcap)
    scores = capped if bias is None else capped + bias.to(working)
    for seen in (block.call.mask, _band(block, rows, columns), _same_segment(block)):
        if seen is not None:
            scores = torch.where(seen, scores, float("-inf"))
    return scores, capped


def _band(block: Block, rows: int, columns: int) -> Tensor | None:
    lower, upper = block.lower, block.upper
    if lower is None and upper is None:
        return None
    device = block.query.device
    offset = torch.arange(columns, device=device) - torch.arange(rows, device=device)[:, None]
    seen = torch.ones_like(offset, dtype=torch.bool)
    if lower is not None:
        seen.logical_and_(offset >= lower)
    if upper is not None:
        seen.logical_and_(offset <= upper)
    return seen


def _same_segment(block: Block) -> Tensor | None:
    query_ids, key_ids = block.call.query_segment_ids, block.call.key_segment_ids
    if query_ids is None or key_ids is None:
        return None
    return query_ids[:, None, :, None] == key_ids[:, None, None, :]


def _kept(block: Block, weights: Tensor) -> Tensor:
    """weights (B, H, R, C) after dropout: a function of their positions in the whole matrix of scores."""
    seed, dropout_prob = block.call.seed, block.call.dropout_prob
    if seed is None or dropout_prob == 0.0:
        return weights
    keep = keep_mask(
        seed, dropout_prob, (weights.shape[0], weights.shape[1], weights.shape[2], weights.shape[3]),
        weights.device, first_row=block.first_row, first_column=block.first_column,
    )  # fmt: skip
    return torch.where(keep, weights / (1.0 - dropout_prob), 0.0)


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """(B, R, H, N) -> (B, R, K, H / K, N)"""
    return x.reshape(*x.shape[:2], kv_heads, x.shape[2] // kv_heads, x.shape[3])


def _by_group(weights: Tensor, kv_heads: int) -> Tensor:
    """(B, H, R, C) -> (B, K, H / K, R, C)"""
    return weights.unflatten(1, (kv_heads, weights.shape[1] // kv_heads))


def _weigh(weights: Tensor, value: Tensor) -> Tensor:
    kv_heads = value.shape[2]
    output = torch.einsum("bkgrc,bckd->brkgd", _by_group(weights, kv_heads), value.to(weights.dtype))
    return output.flatten(2, 3)
