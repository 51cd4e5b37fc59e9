"""Causal convolution by ATen: one multiply-add per tap, over blocks of tokens that stay in the cache.

torch's own convolution wants channels before the sequence: the copies there and back cost more than the sum.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from easytorch.kernels.causal_conv1d.native import check_arguments, document_of, last_tokens, with_past
from easytorch.kernels.recurrence.arguments import wide_dtype

# Numbers of a block, 1 MiB in float32: with its sum it fits the second-level cache.
BLOCK = 2**18


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    activation: str | None = None,
    segment_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`native.causal_conv1d` by ATen: the same shapes, dtypes and errors."""
    check_arguments(x, weight, bias, initial_state, activation, segment_ids)
    wide, width = wide_dtype(x), weight.shape[1]
    number = None if segment_ids is None else document_of(segment_ids, width)
    taps = weight.to(wide).t().contiguous()
    bias = None if bias is None else bias.to(wide)
    size = max(1, BLOCK // max(1, x.shape[0] * x.shape[2]))
    past = with_past(x[:, :0], initial_state, width)
    outputs = []
    # split, not sliced: the gradient of a slice is as large as the tensor it was taken from
    for index, block in enumerate(x.split(size, 1)):
        block = torch.cat([past, block.to(wide)], 1)
        past = block[:, block.shape[1] - (width - 1) :]
        start = index * size
        result = _block(block, taps, bias, None if number is None else number[:, start : start + block.shape[1]])
        outputs.append((result if activation is None else F.silu(result)).to(x.dtype))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1), last_tokens(past, number)


def _block(
    tokens: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None, number: torch.Tensor | None
) -> torch.Tensor:
    """tokens (B, W-1+L, C), the first W-1 of them past -> (B, L, C), the sums before the activation."""
    total, width = bias, taps.shape[0]
    length = tokens.shape[1] - (width - 1)
    for tap in range(width):
        read = tokens[:, tap : tap + length]
        if number is not None:
            read = read * (number[:, tap : tap + length] == number[:, width - 1 :]).unsqueeze(2)
        total = read * taps[tap] if total is None else torch.addcmul(total, read, taps[tap])
    assert total is not None
    return total
