"""Causal convolution by ATen: one multiply and add a tap, over blocks of tokens that stay in the cache.

torch's own convolution wants channels before the sequence: the copies there and back cost more than the sum.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from easytorch.kernels.causal_conv1d.native import check_arguments, document_of, last_tokens, with_past

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
    """What `native.causal_conv1d` defines, with its shapes, dtypes and errors."""
    check_arguments(x, weight, bias, initial_state, activation, segment_ids)
    width, (batch, length, channels) = weight.shape[1], x.shape
    number = None if segment_ids is None else document_of(segment_ids, width)
    extended = with_past(x, initial_state, width)
    taps = weight.to(extended.dtype).t().contiguous()
    bias = None if bias is None else bias.to(extended.dtype)
    size = max(1, BLOCK // max(1, batch * channels))
    blocks = []
    for start in range(0, length, size):
        stop = min(start + size, length)
        block = _block(extended, taps, bias, number, start, stop)
        blocks.append((block if activation is None else F.silu(block)).to(x.dtype))
    outputs = blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1)
    return outputs, last_tokens(extended, length, number)


def _block(
    extended: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None, number: torch.Tensor | None, start: int,
    stop: int,
) -> torch.Tensor:  # fmt: skip
    """The sums of tokens start..stop, before the activation."""
    total, width = bias, taps.shape[0]
    for tap in range(width):
        tokens = extended[:, start + tap : stop + tap]
        if number is not None:
            own = number[:, start + width - 1 : stop + width - 1]
            tokens = tokens * (number[:, start + tap : stop + tap] == own).unsqueeze(2)
        total = tokens * taps[tap] if total is None else torch.addcmul(total, tokens, taps[tap])
    assert total is not None
    return total
