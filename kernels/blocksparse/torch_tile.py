"""One step (aten_plan.py) in plain torch, forward and backward: what ATen's fused kernel lacks.

That is the soft cap, dropout that follows a seed, a value of another head_dim, the gradient of the bias.
Exponentials are taken by exp2: of ATen's functions it takes 0.17 ns an element here, exp 0.6, sigmoid 0.29, tanh 1.9
and masked_fill 2.0 where an addition or product takes 0.1 (EPYC, AVX-512, 2 cores). Its factor log2(e) comes after the
maximum is subtracted: a bias of `torch.finfo(torch.float32).min` times log2(e) would be -inf.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.attention.logsumexp import parts
from easytorch.kernels.attention.native import working_dtype

LOG2E = math.log2(math.e)
# tanh by sigmoid has an error of 1.2e-7 of the cap: far below the rounding of the weights up to here
SIGMOID_CAP = 64.0


def forward(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, bias: Tensor | None, call: AttentionCall,
    keep: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(b, H, R, D), (b, K, C, D), (b, K, C, Dv) -> output (b, H, R, Dv), logsumexp (b, H, 2, R).

    call: the numbers, and the sinks of these heads. keep: what dropout leaves, (b, H, R, C).
    """
    scores, _ = _scores(query, key, seen, bias, call)
    m_i = scores.amax(-1, keepdim=True)
    sink = None if call.sinks is None else call.sinks.to(m_i.dtype)[:, None, None]
    if sink is not None:
        m_i = m_i.maximum(sink)
    origin = torch.where(m_i == -torch.inf, 0.0, m_i)
    weights = scores.sub_(origin).mul_(LOG2E).exp2_()
    l_i = weights.sum(-1, keepdim=True)
    if sink is not None:
        l_i = l_i + torch.exp(sink - origin)
    if keep is not None:
        weights = torch.where(keep, weights, 0.0)
    # the weights are multiplied in bfloat16 for such values: twice as fast, and as exact as a fused kernel
    matrix = weights.to(value.dtype) if value.dtype == torch.bfloat16 else weights
    output = _grouped(matrix, key) @ value.to(matrix.dtype)
    output = output.view(*weights.shape[:3], -1) * (1.0 / (1.0 - call.dropout_prob) / torch.where(l_i == 0.0, 1.0, l_i))
    return output.to(query.dtype), parts(m_i.squeeze(-1), l_i.squeeze(-1))


def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, bias: Tensor | None, output: Tensor,
    logsumexp: Tensor, call: AttentionCall, keep: Tensor | None, *, bias_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradients of query, key, value, and with `bias_grad` of the scores (b, H, R, C); the formulas:
    kernels/attention/triton_flash_backward_keys.py."""
    scores, slope = _scores(query, key, seen, bias, call, slope=True)
    maximum, log_sum = logsumexp.unbind(2)
    weights = scores.sub_(maximum[..., None]).sub_(log_sum[..., None]).mul_(LOG2E).exp2_()
    grad = grad.to(weights.dtype)
    delta = (grad * output).sum(-1, keepdim=True)
    grads = _grouped(grad, key)
    score_grad = (grads @ value.to(weights.dtype).mT).view_as(weights)
    kept = weights
    if keep is not None:
        rescale = 1.0 / (1.0 - call.dropout_prob)
        kept, score_grad = (torch.where(keep, x * rescale, 0.0) for x in (weights, score_grad))
    value_grad = _grouped(kept, key).mT @ grads
    score_grad = score_grad.sub_(delta).mul_(weights)
    added_grad = score_grad.clone() if bias_grad else None
    if slope is not None:
        score_grad.mul_(slope)
    flat = _grouped(score_grad, key).mul_(call.scale)
    query_grad = (flat @ key.to(flat.dtype)).view(query.shape)
    key_grad = flat.mT @ _grouped(query.to(flat.dtype), key)
    return query_grad, key_grad, value_grad, added_grad


def _scores(
    query: Tensor, key: Tensor, seen: Tensor | None, bias: Tensor | None, call: AttentionCall, *,
    slope: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """scores (b, H, R, C), -inf where not seen; with `slope`, the derivative of the soft cap."""
    working = working_dtype(query)
    scores = _grouped(query.to(working), key) @ key.to(working).mT
    scores = scores.view(*query.shape[:3], key.shape[2])
    scale, softcap, derivative = call.scale, call.softcap, None
    if softcap is None:
        scores.mul_(scale)
    elif softcap <= SIGMOID_CAP and working == torch.float32:
        # tanh(x) = 2 sigmoid(2x) - 1
        half = scores.mul_(2.0 * scale / softcap).sigmoid_()
        derivative = (4.0 * half).mul_(1.0 - half) if slope else None
        scores = half.mul_(2.0 * softcap).sub_(softcap)
    else:
        capped = scores.mul_(scale / softcap).tanh_()
        derivative = 1.0 - capped.square() if slope else None
        scores = capped.mul_(softcap)
    if bias is not None:
        scores.add_(bias.to(working))
    if seen is not None:
        scores.add_(torch.zeros(seen.shape, dtype=working).masked_fill_(~seen, -torch.inf))
    return scores, derivative


def _grouped(rows: Tensor, key: Tensor) -> Tensor:
    """(b, H, R, N) -> (b, K, G * R, N): the query heads of a key head as more rows of one matrix."""
    return rows.reshape(rows.shape[0], key.shape[1], -1, rows.shape[3])
