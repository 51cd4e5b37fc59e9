"""The logarithm of a row's sum of exponentials in two parts: its maximum, and the logarithm of what is above it.

In one float32 number a maximum of 1e6 has no room for the logarithm of a small sum, and one of -3.4e38, a row whose
bias is `torch.finfo(torch.float32).min` throughout, for that of any: weights exp(score - logsumexp) would not add up to
1. The parts are (..., 2, R): `maximum` and `log_sum` with logsumexp = maximum + log_sum, and 0 and +inf for a row that
sees nothing, whose weights are exp(-inf - 0 - inf) = 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Up to here one float32 number is as exact as the scores that it is made of: its rounding, 2**-24 of it, is 6e-5.
LARGEST = 1024.0


def logsumexp_of(scores: Tensor) -> Tensor:
    """(..., R, C), -inf where unseen -> (..., 2, R)."""
    maximum = scores.amax(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], float("-inf"))
    origin = torch.where(maximum == float("-inf"), 0.0, maximum)
    return parts(maximum, torch.exp(scores - origin[..., None]).sum(-1))


def parts(maximum: Tensor, total: Tensor) -> Tensor:
    """From the maximum, -inf where a row sees nothing, and the sum of exp(score - maximum), both (..., R)."""
    empty = total == 0.0
    return torch.stack((torch.where(empty, 0.0, maximum), torch.where(empty, float("inf"), total.log())), -2)


def weights_of(scores: Tensor, logsumexp: Tensor) -> Tensor:
    """exp(score - logsumexp) of scores (..., R, C)."""
    maximum, log_sum = logsumexp.unbind(-2)
    return torch.exp((scores - maximum[..., None]).sub_(log_sum[..., None]))


def sink_share(sinks: Tensor | None, logsumexp: Tensor, delta: Tensor) -> Tensor:
    """weight of the sink * delta, (B, H, T): zeros without sinks, (H,).

    delta: sum over the value of output * its gradient, which is the sum over the keys of weight * gradient of weight.
    Minus its sum over the rows is the gradient of the sinks. It is also the gradient of a bias that is the same for all
    keys of a row, sum of weight * (gradient of weight - delta) = delta * (1 - sum of weights): as a sum over the keys
    most of it cancels, and what an output of bfloat16 has lost of delta would be left.
    """
    if sinks is None:
        return torch.zeros_like(delta)
    return weights_of(sinks.to(delta.dtype)[:, None, None], logsumexp)[..., 0] * delta


def from_one_number(logsumexp: Tensor) -> Tensor:
    """(..., R), infinity of either sign for a row that sees nothing -> (..., 2, R)."""
    empty = logsumexp.isinf()
    return torch.stack((torch.where(empty, 0.0, logsumexp), torch.where(empty, float("inf"), 0.0)), -2)


def one_number(logsumexp: Tensor) -> Tensor:
    """The sum of the parts (..., R), for kernels that take it so: see `fits_one_number`."""
    return logsumexp.sum(-2)


def fits_one_number(logsumexp: Tensor) -> bool:
    """Whether logsumexps of single numbers, with infinity of either sign for rows that see nothing, are exact."""
    if logsumexp.numel() == 0 or float(torch.linalg.vector_norm(logsumexp.detach(), math.inf)) <= LARGEST:
        return True  # as in most calls, where every row sees something
    return not bool(((logsumexp.abs() > LARGEST) & ~logsumexp.isinf()).any())
