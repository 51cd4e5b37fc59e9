"""The gated delta rule with a decay for each channel of the keys, chunk by chunk: https://arxiv.org/abs/2510.26692.

The decays between two tokens of a chunk weight each channel of the product of their keys. Between blocks of tokens they
are split at the later block's first token, and the products are matrix products; both factors are at most 1. Within a
block they are multiplied out.
"""

from __future__ import annotations

import torch

from easytorch.kernels.gated_delta_rule.native import DeltaRuleDims
from easytorch.kernels.recurrence import documents
from easytorch.kernels.recurrence.decay import running_sums

CHUNK, BLOCK = 64, 16


def chunks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    state: torch.Tensor, number: torch.Tensor | None, sizes: DeltaRuleDims,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """As `aten.chunks`, g (B, T, Hv, Dk)."""
    shared, parts = sizes.value_heads // sizes.heads, []
    query, key = (tensor.repeat_interleave(shared, 2) for tensor in (query, key))  # the decays are a value head's own
    owners = documents.of_chunks(number, sizes.length, CHUNK)
    tensors = (tensor.transpose(1, 2).split(CHUNK, 2) for tensor in (query, key, value, g, beta))
    for own, queries, keys, values, logs, rates in zip(owners, *tensors, strict=True):
        outputs, state = _chunk(queries, keys, values, logs, rates.unsqueeze(3), state, own)
        parts.append(outputs.transpose(1, 2))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1), state


def _chunk(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log: torch.Tensor, rate: torch.Tensor,
    state: torch.Tensor, number: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """query, key, log (B, Hv, L, Dk), value (B, Hv, L, Dv), rate (B, Hv, L, 1), state (B, Hv, Dk, Dv), number (B, L)
    -> outputs as value, the state after."""
    total = running_sums(log, value.dtype, 2)
    before, after = total.to(value.dtype).exp(), (total[:, :, -1:] - total).to(value.dtype).exp()
    pairs, query_pairs = decayed_pairs(torch.stack((key, query)), key, total).unbind(0)
    if number is not None:
        apart = number.unsqueeze(-1) != number.unsqueeze(-2)
        pairs, query_pairs = (one.masked_fill(apart.unsqueeze(1), 0.0) for one in (pairs, query_pairs))
        before = before.masked_fill((number != 0)[:, None, :, None], 0.0)
        after = after.masked_fill((number != number[:, -1:])[:, None, :, None], 0.0)
    known = rate * (value - (before * key) @ state)
    # the system's diagonal is not read: it counts as one
    changes = torch.linalg.solve_triangular(pairs * rate, known, upper=False, unitriangular=True)
    outputs = query_pairs @ changes + (before * query) @ state
    left = (after * key).transpose(2, 3) @ changes
    return outputs, torch.addcmul(left, before[:, :, -1].unsqueeze(3), state)


def decayed_pairs(rows: torch.Tensor, columns: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """rows (2, B, H, L, D), columns (B, H, L, D), total (B, H, L, D) running sums of logarithms -> (2, B, H, L, L):
    the sum over channels of rows_i columns_j exp(total_i - total_j), 0 above the diagonal."""
    length, dtype, parts = columns.shape[2], columns.dtype, []
    later = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=columns.device).triu(1).unsqueeze(2)
    for start in range(0, length, BLOCK):
        end = min(start + BLOCK, length)
        own, sums, size = rows[..., start:end, :], total[:, :, start:end], end - start
        between = (sums.unsqueeze(3) - sums.unsqueeze(2)).to(dtype)
        # masked before exp, which would overflow above the diagonal
        between = between.masked_fill(later[:size, :size], float("-inf")).exp()
        weighted = between * columns[:, :, start:end].unsqueeze(2)  # (B, H, i, j, D)
        blocks = [(weighted @ own.unsqueeze(5)).squeeze(5)]
        if start:
            first = total[:, :, start : start + 1]
            earlier = columns[:, :, :start] * (first - total[:, :, :start]).to(dtype).exp()
            blocks.insert(0, (own * (sums - first).to(dtype).exp()) @ earlier.mT)
        if end < length:
            blocks.append(own.new_zeros(*own.shape[:-1], length - end))
        parts.append(torch.cat(blocks, -1))
    return torch.cat(parts, -2)
