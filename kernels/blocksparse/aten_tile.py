"""One step (aten_plan.py) by ATen's fused CPU kernel, forward and backward.

Sinks are applied to its result: with z the logarithm of the sum of exponentials that the kernel returns, the output
with a sink is output * sigmoid(z - sink), and backward with z' = logaddexp(z, sink) in its place is that of the whole.
A step with a z that one number does not hold (attention/logsumexp.py) is torch_tile.py's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from easytorch.kernels.attention.aten import addend
from easytorch.kernels.attention.aten_fused import LANES
from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.attention.logsumexp import fits_one_number, from_one_number, one_number
from easytorch.kernels.blocksparse import torch_tile

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def forward(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, bias: Tensor | None, call: AttentionCall,
    keep: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(b, H, R, D), (b, K, C, D) twice -> output (b, H, R, D), logsumexp (b, H, 2, R)."""
    added = _added(query, key, seen, bias)
    if added is None and key.shape[2] < LANES:  # the kernel loses a query of NaN there
        return torch_tile.forward(query, key, value, seen, bias, call, keep)
    output, logsumexp = _forward(query, key, value, attn_mask=added, scale=call.scale)
    if added is not None:
        empty = (added == -torch.inf).all(-1)
        if empty.any():
            output = torch.where(empty[..., None], 0.0, output)
            logsumexp = torch.where(empty, -torch.inf, logsumexp)
    total = logsumexp
    if call.sinks is not None:
        total = torch.logaddexp(logsumexp, call.sinks.to(logsumexp.dtype)[:, None])
        # a sink of -inf leaves a row that sees nothing without any weight
        share = torch.where(total == -torch.inf, 0.0, torch.exp(logsumexp - total))
        output = (output * share[..., None]).to(output.dtype)
    if not (fits_one_number(logsumexp) and fits_one_number(total)):
        return torch_tile.forward(query, key, value, seen, bias, call, keep)
    return output, from_one_number(total)


def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, bias: Tensor | None, output: Tensor,
    logsumexp: Tensor, call: AttentionCall, keep: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradients of query, key and value, from that of `forward`'s first result; none of the bias."""
    single = one_number(logsumexp)
    if not fits_one_number(single):
        return torch_tile.backward(grad, query, key, value, seen, bias, output, logsumexp, call, keep)
    added = _added(query, key, seen, bias)
    return *_backward(grad, query, key, value, output, single, 0.0, False, attn_mask=added, scale=call.scale), None


def _added(query: Tensor, key: Tensor, seen: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """ATen's one mask, (1 or b, 1 or H, R, C): the bias, and -inf where a key is not seen."""
    if bias is not None:
        added = addend(bias, query)
        if seen is not None:
            added = torch.where(seen, added, -torch.inf)
    elif seen is not None:
        added = torch.zeros(seen.shape, dtype=query.dtype).masked_fill_(~seen, -torch.inf)
    else:
        return None
    added = added.reshape((1,) * (4 - added.dim()) + tuple(added.shape))
    return added.expand(*added.shape[:2], query.shape[2], key.shape[2]).contiguous()
