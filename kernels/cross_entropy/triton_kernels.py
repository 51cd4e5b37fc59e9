"""The kernels of softmax cross entropy: a row of logits is read once forward, and read and written once backward.

A label that is neither `ignore_index` nor in [0, V) makes its row's loss and gradient NaN: a GPU cannot raise.
"""

from __future__ import annotations

import triton
import triton.language as tl

from easytorch.kernels.interop.triton_math import tanh


@triton.jit
def _capped(x, softcap):
    x = x.to(tl.float32)
    if softcap is not None:
        x = tanh(x / softcap) * softcap
    return x


@triton.jit
def cross_entropy_forward(
    logits, labels, losses, lse, logits_stride, N, V, ignore_index, smoothing, softcap, z_loss, BLOCK: tl.constexpr
):
    """Fills losses (N,) and lse (2, N), float32. One program per row; smoothing and softcap are None where there is
    none.

    lse: a row's largest logit, and the logarithm of the sum of exponentials above it. In one number a logit of 1e6
    leaves the logarithm no digits.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    label = tl.load(labels + row).to(tl.int64)
    inside = (label >= 0) & (label < V)
    picked = _capped(tl.load(logits + tl.where(inside, label, 0)), softcap)
    # the running maximum and sum of exponentials of https://arxiv.org/abs/1805.02867
    m_i = tl.full((), float("-inf"), tl.float32)
    l_i = tl.full((), 0.0, tl.float32)
    plain = tl.full((), 0.0, tl.float32)
    near = tl.where(tl.abs(picked) < float("inf"), picked, 0.0)  # of the size of the others, for sums without rounding
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        z = _capped(tl.load(logits + columns, mask=columns < V, other=0.0), softcap)
        if smoothing is not None:
            plain += tl.sum(tl.where(columns < V, z - near, 0.0), 0)
        z = tl.where(columns < V, z, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(z, 0))
        # a block of only -inf: the difference of two infinities is NaN
        reference = tl.where(m_new == float("-inf"), 0.0, m_new)
        l_i = l_i * tl.exp(m_i - reference) + tl.sum(tl.exp(z - reference), 0)
        m_i = m_new
    log_sum = tl.log(l_i)
    loss = m_i - picked
    if smoothing is not None:
        loss = (1.0 - smoothing) * loss + smoothing * (m_i - near - plain / V)
    row_lse = m_i + log_sum
    loss += log_sum + z_loss * row_lse * row_lse
    loss = tl.where(inside, loss, float("nan"))
    tl.store(losses + row, tl.where(label == ignore_index, 0.0, loss))
    tl.store(lse + row, m_i)
    tl.store(lse + N + row, log_sum)


@triton.jit
def cross_entropy_backward(
    losses_grad, logits, labels, lse, logits_grad, losses_grad_stride, logits_stride, N, V, ignore_index, smoothing,
    softcap, z_loss, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fills logits_grad (N, V), contiguous, which may be the logits. One program per block of a row.

    With p = exp(z - lse): p * (1 + 2 * z_loss * lse) - (1 - smoothing) at the label - smoothing / V, times the slope of
    the cap, times the loss's own gradient.
    """
    blocks = tl.cdiv(V, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(labels + row).to(tl.int64)
    m_i = tl.load(lse + row)
    log_sum = tl.load(lse + N + row)
    upstream = tl.load(losses_grad + row * losses_grad_stride).to(tl.float32)
    z = _capped(tl.load(logits + row * logits_stride + columns, mask=columns < V, other=0.0), softcap)
    grad = tl.exp(z - m_i - log_sum) * (1.0 + 2.0 * z_loss * (m_i + log_sum))
    share = 1.0
    if smoothing is not None:
        share = 1.0 - smoothing
        grad -= smoothing / V
    grad = tl.where(columns == label, grad - share, grad)
    if softcap is not None:
        ratio = z / softcap
        grad *= 1.0 - ratio * ratio
    grad = tl.where((label >= 0) & (label < V), grad * upstream, float("nan"))
    grad = tl.where(label == ignore_index, 0.0, grad)
    tl.store(logits_grad + row * V + columns, grad.to(logits_grad.dtype.element_ty), mask=columns < V)
